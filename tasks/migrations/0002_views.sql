-- The usual questions without joins.

CREATE VIEW demand AS
SELECT service, ts, arg_max(value, recorded_at) AS value, arg_max(gpus, recorded_at) AS gpus, arg_max(origin, recorded_at) AS origin
FROM demand_samples GROUP BY service, ts;
COMMENT ON VIEW demand IS 'Observed load, the latest word on each sample';

CREATE VIEW nodes AS
SELECT node, arg_max(state, recorded_at) AS state, arg_max(reason, recorded_at) AS reason, max(recorded_at) AS since FROM node_states GROUP BY node;
COMMENT ON VIEW nodes IS 'Health of each node, as last seen';

CREATE VIEW ranks AS
SELECT a.*, s.recorded_at AS started_at, coalesce(s.void, false) AS void, s.pid, o.state AS outcome, o.ended_at, o.exit_code
FROM allocations a
LEFT JOIN starts s USING (job, attempt, rank)
LEFT JOIN outcomes o USING (job, attempt, rank);
COMMENT ON VIEW ranks IS 'Each node''s part in each attempt; without an outcome it may still hold its GPUs';

CREATE VIEW attempts AS
SELECT
    job, attempt, min(instant) AS instant, any_value(key) AS key, min(start_at) AS start_at,
    max(end_at) AS end_at, any_value(ranks) AS ranks, list(node ORDER BY rank) AS nodes,
    sum(len(gpus))::INTEGER AS gpus, count(started_at) FILTER (NOT void) AS started,
    count(outcome) AS ended, max(started_at) FILTER (NOT void) AS started_at, max(ended_at) AS ended_at,
    coalesce(bool_or(exit_code = 2), false) AS wrong_spec,
    CASE
        WHEN count(outcome) = any_value(ranks) THEN [
            'cancelled', 'timed_out', 'failed', 'crashed', 'lost', 'not_started', 'stopped', 'completed'
        ][min(list_position([
            'cancelled', 'timed_out', 'failed', 'crashed', 'lost', 'not_started', 'stopped', 'completed'
        ], outcome))]
        WHEN count(outcome) > 0 THEN 'ending'
        WHEN count(started_at) FILTER (NOT void) = any_value(ranks) THEN 'running'
        WHEN count(started_at) FILTER (NOT void) > 0 THEN 'starting'
        ELSE 'committed'
    END AS state
FROM ranks GROUP BY job, attempt;
COMMENT ON VIEW attempts IS 'Each committed attempt of each job, and how far it is';

CREATE VIEW jobs AS
WITH last AS (
    SELECT * FROM attempts QUALIFY row_number() OVER (PARTITION BY job ORDER BY attempt DESC) = 1
), tries AS (
    SELECT job, count(*) FILTER (state IN ('failed', 'crashed', 'lost', 'stopped')) AS failures,
        max(attempt) AS attempts
    FROM attempts GROUP BY job
), requests AS (
    SELECT job, min(recorded_at) AS cancel_at FROM cancels GROUP BY job
)
SELECT
    s.job, s.kind, s.tenant, s.gpus, s.priority, s.value, s.duration_s, s.max_duration_s, s.submitted_at,
    s.release_at, s.deadline_at, s.gpu_types, s.max_attempts, s.template, s.key AS spec_key, s.source,
    coalesce(t.attempts, 0)::INTEGER AS attempts, coalesce(t.failures, 0)::INTEGER AS failures,
    CASE
        WHEN l.state IN ('committed', 'starting', 'running', 'ending', 'completed', 'cancelled') THEN l.state
        WHEN r.cancel_at IS NOT NULL THEN 'cancelled'
        WHEN l.state = 'timed_out' OR l.wrong_spec OR t.failures >= s.max_attempts THEN 'failed'
        WHEN s.deadline_at <= now() THEN 'expired'
        ELSE 'queued'
    END AS state,
    l.state AS last_attempt, l.instant AS committed_at, l.start_at, l.started_at, l.end_at, l.ended_at, l.nodes,
    r.cancel_at,
    date_diff('second', greatest(s.submitted_at, s.release_at), coalesce(l.started_at, now())) AS wait_s,
    CASE WHEN l.state = 'completed' AND (s.deadline_at IS NULL OR l.ended_at <= s.deadline_at)
        THEN s.value ELSE 0 END AS earned
FROM specs s
LEFT JOIN last l USING (job)
LEFT JOIN tries t USING (job)
LEFT JOIN requests r ON r.job = s.job OR (r.job = s.template AND l.state IS NULL)
WHERE s.schedule IS NULL;
COMMENT ON VIEW jobs IS 'Every job and its state: queued, committed, starting, running, ending, completed, failed, cancelled, expired';

CREATE VIEW runs AS
SELECT
    o.job, o.attempt, s.kind, s.tenant, s.priority, any_value(a.nodes) AS nodes, any_value(a.gpus) AS gpus,
    any_value(a.state) AS state, min(o.started_at) AS started_at, max(o.ended_at) AS ended_at,
    date_diff('millisecond', min(o.started_at), max(o.ended_at)) / 1000 AS seconds,
    sum(o.gpu_seconds) AS gpu_seconds, sum(o.cost) AS cost, avg(o.mfu) AS mfu, sum(o.tokens_per_s) AS tokens_per_s,
    sum(o.rows_per_s) AS rows_per_s, arg_min(o.loss, o.rank) AS loss, any_value(s.value) AS value,
    string_agg(o.error, '; ' ORDER BY o.rank) AS error, arg_min(o.metrics, o.rank) AS metrics
FROM outcomes o JOIN attempts a USING (job, attempt) JOIN specs s USING (job)
GROUP BY o.job, o.attempt, s.kind, s.tenant, s.priority;
COMMENT ON VIEW runs IS 'Every attempt that ended: MFU, speed, GPU seconds, cost, value, error';

CREATE VIEW recurring AS
SELECT t.job, t.schedule, t.spec, t.source, t.sha256, coalesce(max(o.release_at), t.submitted_at) AS last
FROM specs t LEFT JOIN specs o ON o.template = t.job
WHERE t.schedule IS NOT NULL AND t.job NOT IN (SELECT job FROM cancels)
GROUP BY t.job, t.schedule, t.spec, t.source, t.sha256, t.submitted_at;
COMMENT ON VIEW recurring IS 'Recurring jobs that are not cancelled, and their latest occurrence so far';

CREATE VIEW live_ranks AS
SELECT r.*, coalesce(j.cancel_at IS NOT NULL, false) AS cancel,
    EXISTS (FROM outcomes o WHERE o.job = r.job AND o.attempt = r.attempt AND o.rank <> r.rank) AS peer_ended
FROM ranks r LEFT JOIN jobs j USING (job) WHERE r.outcome IS NULL;
COMMENT ON VIEW live_ranks IS 'Ranks without an outcome: whether their job is to be cancelled, or a peer has ended';

CREATE VIEW serving_counts AS
WITH commitments AS (
    SELECT service, instant, lead(instant) OVER (PARTITION BY service ORDER BY instant) AS superseded_at
    FROM (SELECT DISTINCT service, instant FROM serving)
)
SELECT s.service, s.from_at, sum(len(s.gpus))::INTEGER AS gpus
FROM serving s JOIN commitments c USING (service, instant)
WHERE s.from_at < coalesce(c.superseded_at, TIMESTAMPTZ 'infinity')
GROUP BY s.service, s.instant, s.from_at;
COMMENT ON VIEW serving_counts IS 'How many GPUs each service was given, from when on, until its next row';

CREATE VIEW durations AS
SELECT r.job, r.kind, s.template, r.gpus, s.duration_s AS declared_s, r.seconds AS actual_s, r.ended_at
FROM runs r JOIN specs s USING (job) WHERE r.state = 'completed';
COMMENT ON VIEW durations IS 'Declared and actual durations of what completed, from which estimates learn';

CREATE VIEW holders AS
SELECT
    j.job, j.kind, j.value, j.priority, j.duration_s, j.last_attempt, a.start_at, a.started_at, a.end_at,
    a.ended = a.ranks AS over, list({'node': r.node, 'gpus': r.gpus} ORDER BY r.rank) AS nodes
FROM jobs j
JOIN attempts a ON a.job = j.job AND a.attempt = j.attempts
JOIN ranks r ON r.job = a.job AND r.attempt = a.attempt
WHERE a.ended < a.ranks OR (j.state = 'queued' AND NOT a.wrong_spec)
GROUP BY ALL ORDER BY a.start_at, j.job;
COMMENT ON VIEW holders IS 'Attempts that hold GPUs or will, and (over) the last of jobs that wait to be tried again';

CREATE VIEW forecast_errors AS
SELECT f.service, f.instant, f.step, f.ts, f.quantiles[1] AS low, f.quantiles[5] AS expected,
    f.quantiles[10] AS high, d.gpus AS actual, d.gpus - f.quantiles[5] AS error, f.method
FROM forecasts f JOIN demand d USING (service, ts);
COMMENT ON VIEW forecast_errors IS 'What was expected beside what came, for every slot that has passed';

CREATE VIEW hours AS
SELECT p.instant, p.mode, p.value AS planned_value, p.utilization AS planned_utilization, p.fifo_value,
    p.backfill_value, p.greedy_value, p.placed, p.unplaced, p.solve_ms, s.utilization, s.value, s.completed,
    s.failed, s.shortage_gpu_s
FROM plans p LEFT JOIN slots s USING (instant) WHERE p.trigger = 'hourly';
COMMENT ON VIEW hours IS 'Each planned hour: the plan, the baselines, and what happened';
