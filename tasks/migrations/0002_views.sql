-- The usual questions without joins.

CREATE VIEW demand AS
SELECT service, ts, arg_max(value, recorded_at) AS value, arg_max(gpus, recorded_at) AS gpus, arg_max(origin, recorded_at) AS origin
FROM demand_samples GROUP BY service, ts;
COMMENT ON VIEW demand IS 'Observed load, the latest word on each sample';
COMMENT ON COLUMN demand.service IS 'The real-time service';
COMMENT ON COLUMN demand.ts IS 'Begin of the time the sample covers';
COMMENT ON COLUMN demand.value IS 'The load in the source''s unit, such as requests/s';
COMMENT ON COLUMN demand.gpus IS 'GPUs this load needs, with a fraction';
COMMENT ON COLUMN demand.origin IS 'observed: seen as it came; recorded: history that was loaded';

CREATE VIEW nodes AS
SELECT node, arg_max(state, recorded_at) AS state, arg_max(reason, recorded_at) AS reason, max(recorded_at) AS since FROM node_states GROUP BY node;
COMMENT ON VIEW nodes IS 'Health of each node, as last seen';
COMMENT ON COLUMN nodes.node IS 'The node';
COMMENT ON COLUMN nodes.state IS 'ready: its worker answers; lost: it does not';
COMMENT ON COLUMN nodes.reason IS 'Why';
COMMENT ON COLUMN nodes.since IS 'When this state was first seen';

CREATE VIEW ranks AS
SELECT a.*, s.recorded_at AS started_at, coalesce(s.void, false) AS void, s.pid, o.state AS outcome, o.ended_at, o.exit_code
FROM allocations a
LEFT JOIN starts s USING (job, attempt, rank)
LEFT JOIN outcomes o USING (job, attempt, rank);
COMMENT ON VIEW ranks IS 'Each node''s part in each attempt; without an outcome it may still hold its GPUs';
COMMENT ON COLUMN ranks.instant IS 'Instant of the commitment';
COMMENT ON COLUMN ranks.job IS 'The job';
COMMENT ON COLUMN ranks.attempt IS '1 for the first attempt';
COMMENT ON COLUMN ranks.rank IS 'The node''s rank within the gang, 0 for the first';
COMMENT ON COLUMN ranks.ranks IS 'Nodes in the gang';
COMMENT ON COLUMN ranks.node IS 'The node';
COMMENT ON COLUMN ranks.gpus IS 'GPU indices on that node';
COMMENT ON COLUMN ranks.start_at IS 'Committed start';
COMMENT ON COLUMN ranks.end_at IS 'Expected end';
COMMENT ON COLUMN ranks.key IS 'Key of the commitment';
COMMENT ON COLUMN ranks.started_at IS 'When its start was claimed, or voided';
COMMENT ON COLUMN ranks.void IS 'True: it can never begin';
COMMENT ON COLUMN ranks.pid IS 'Process id of its runner';
COMMENT ON COLUMN ranks.outcome IS 'How it ended; NULL while it has not';
COMMENT ON COLUMN ranks.ended_at IS 'When it ended';
COMMENT ON COLUMN ranks.exit_code IS 'Of the program; negative: the signal that ended it';

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
COMMENT ON COLUMN attempts.job IS 'The job';
COMMENT ON COLUMN attempts.attempt IS '1 for the first attempt';
COMMENT ON COLUMN attempts.instant IS 'Instant of the commitment';
COMMENT ON COLUMN attempts.key IS 'Key of the commitment';
COMMENT ON COLUMN attempts.start_at IS 'Committed start';
COMMENT ON COLUMN attempts.end_at IS 'Expected end';
COMMENT ON COLUMN attempts.ranks IS 'Nodes in the gang';
COMMENT ON COLUMN attempts.nodes IS 'Their names, by rank';
COMMENT ON COLUMN attempts.gpus IS 'GPUs on all of them';
COMMENT ON COLUMN attempts.started IS 'Ranks that began';
COMMENT ON COLUMN attempts.ended IS 'Ranks that have an outcome';
COMMENT ON COLUMN attempts.started_at IS 'When the last rank claimed its start';
COMMENT ON COLUMN attempts.ended_at IS 'When the last rank that is over ended';
COMMENT ON COLUMN attempts.wrong_spec IS 'True: a program said that its spec cannot work; it is not tried again';
COMMENT ON COLUMN attempts.state IS
    'committed, starting, running, ending, or the worst outcome of its ranks once all have one';

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
        WHEN r.cancel_at IS NOT NULL OR series.cancel_at IS NOT NULL THEN 'cancelled'
        WHEN l.state = 'timed_out' OR l.wrong_spec OR t.failures >= s.max_attempts THEN 'failed'
        WHEN s.deadline_at <= now() THEN 'expired'
        ELSE 'queued'
    END AS state,
    l.state AS last_attempt, l.instant AS committed_at, l.start_at, l.started_at, l.end_at, l.ended_at, l.nodes,
    least(r.cancel_at, series.cancel_at) AS cancel_at,
    date_diff('second', greatest(s.submitted_at, s.release_at), coalesce(l.started_at, now())) AS wait_s,
    CASE WHEN l.state = 'completed' AND (s.deadline_at IS NULL OR l.ended_at <= s.deadline_at)
        THEN s.value ELSE 0 END AS earned
FROM specs s
LEFT JOIN last l USING (job)
LEFT JOIN tries t USING (job)
LEFT JOIN requests r ON r.job = s.job
LEFT JOIN requests series ON series.job = s.template AND l.state IS NULL
WHERE s.schedule IS NULL;
COMMENT ON VIEW jobs IS 'Every job and its state: queued, committed, starting, running, ending, completed, failed, cancelled, expired';
COMMENT ON COLUMN jobs.job IS 'The job''s id; an occurrence carries its instant after an @';
COMMENT ON COLUMN jobs.kind IS 'training, batch_inference or quantization';
COMMENT ON COLUMN jobs.tenant IS 'Whose job it is';
COMMENT ON COLUMN jobs.gpus IS 'GPUs it asks for';
COMMENT ON COLUMN jobs.priority IS 'Worth of one of its GPU-hours';
COMMENT ON COLUMN jobs.value IS 'Worth when it completes in time; never changes';
COMMENT ON COLUMN jobs.duration_s IS 'Declared duration, seconds';
COMMENT ON COLUMN jobs.max_duration_s IS 'Where the runner ends it, seconds after its start';
COMMENT ON COLUMN jobs.submitted_at IS 'When it was taken in';
COMMENT ON COLUMN jobs.release_at IS 'It may start from here on';
COMMENT ON COLUMN jobs.deadline_at IS 'It earns nothing when it ends later';
COMMENT ON COLUMN jobs.gpu_types IS 'GPU types it accepts; NULL for any';
COMMENT ON COLUMN jobs.max_attempts IS 'Attempts that may fail before the job has failed';
COMMENT ON COLUMN jobs.template IS 'The recurring job it is an occurrence of';
COMMENT ON COLUMN jobs.spec_key IS 'Key of the fact with its spec';
COMMENT ON COLUMN jobs.source IS 'Name of the file it came from';
COMMENT ON COLUMN jobs.attempts IS 'Attempts that were committed';
COMMENT ON COLUMN jobs.failures IS 'Those of them that count against max_attempts';
COMMENT ON COLUMN jobs.state IS
    'queued, committed, starting, running, ending, completed, failed, cancelled or expired';
COMMENT ON COLUMN jobs.last_attempt IS 'State of the latest attempt';
COMMENT ON COLUMN jobs.committed_at IS 'Instant of its commitment';
COMMENT ON COLUMN jobs.start_at IS 'Its committed start';
COMMENT ON COLUMN jobs.started_at IS 'When it began';
COMMENT ON COLUMN jobs.end_at IS 'Its expected end';
COMMENT ON COLUMN jobs.ended_at IS 'When it ended';
COMMENT ON COLUMN jobs.nodes IS 'Its nodes, by rank';
COMMENT ON COLUMN jobs.cancel_at IS 'When a request to end the job was taken in';
COMMENT ON COLUMN jobs.wait_s IS 'Seconds from when it could have started to its latest start, or to now';
COMMENT ON COLUMN jobs.earned IS 'Its value if it completed in time, else 0';

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
COMMENT ON COLUMN runs.job IS 'The job';
COMMENT ON COLUMN runs.attempt IS '1 for the first attempt';
COMMENT ON COLUMN runs.kind IS 'training, batch_inference or quantization';
COMMENT ON COLUMN runs.tenant IS 'Whose job it is';
COMMENT ON COLUMN runs.priority IS 'Worth of one of its GPU-hours';
COMMENT ON COLUMN runs.nodes IS 'Its nodes, by rank';
COMMENT ON COLUMN runs.gpus IS 'GPUs on all of them';
COMMENT ON COLUMN runs.state IS 'How it ended';
COMMENT ON COLUMN runs.started_at IS 'First instruction';
COMMENT ON COLUMN runs.ended_at IS 'Last';
COMMENT ON COLUMN runs.seconds IS 'From the one to the other';
COMMENT ON COLUMN runs.gpu_seconds IS 'GPUs x seconds held';
COMMENT ON COLUMN runs.cost IS 'gpu_seconds at the nodes'' prices';
COMMENT ON COLUMN runs.mfu IS 'Model FLOPs utilization, 0 to 1, mean over the ranks';
COMMENT ON COLUMN runs.tokens_per_s IS 'Tokens per second, all ranks';
COMMENT ON COLUMN runs.rows_per_s IS 'Rows per second, all ranks';
COMMENT ON COLUMN runs.loss IS 'Last training loss of rank 0, nats per token';
COMMENT ON COLUMN runs.value IS 'Worth of the job when done';
COMMENT ON COLUMN runs.error IS 'What went wrong, by rank';
COMMENT ON COLUMN runs.metrics IS 'Everything that rank 0 reported';

CREATE VIEW recurring AS
SELECT t.job, t.schedule, t.spec, t.source, t.sha256, coalesce(max(o.release_at), t.submitted_at) AS last
FROM specs t LEFT JOIN specs o ON o.template = t.job
WHERE t.schedule IS NOT NULL AND t.job NOT IN (SELECT job FROM cancels)
GROUP BY t.job, t.schedule, t.spec, t.source, t.sha256, t.submitted_at;
COMMENT ON VIEW recurring IS 'Recurring jobs that are not cancelled, and their latest occurrence so far';
COMMENT ON COLUMN recurring.job IS 'The recurring job';
COMMENT ON COLUMN recurring.schedule IS 'Its cron fields';
COMMENT ON COLUMN recurring.spec IS 'Its whole spec';
COMMENT ON COLUMN recurring.source IS 'Name of the file it came from';
COMMENT ON COLUMN recurring.sha256 IS 'Hash of that file';
COMMENT ON COLUMN recurring.last IS 'Its latest occurrence so far; before the first, when it was taken in';

CREATE VIEW live_ranks AS
SELECT r.*, coalesce(j.cancel_at IS NOT NULL, false) AS cancel,
    EXISTS (FROM outcomes o WHERE o.job = r.job AND o.attempt = r.attempt AND o.rank <> r.rank) AS peer_ended
FROM ranks r LEFT JOIN jobs j USING (job) WHERE r.outcome IS NULL;
COMMENT ON VIEW live_ranks IS 'Ranks without an outcome: whether their job is to be cancelled, or a peer has ended';
COMMENT ON COLUMN live_ranks.instant IS 'Instant of the commitment';
COMMENT ON COLUMN live_ranks.job IS 'The job';
COMMENT ON COLUMN live_ranks.attempt IS '1 for the first attempt';
COMMENT ON COLUMN live_ranks.rank IS 'The node''s rank within the gang, 0 for the first';
COMMENT ON COLUMN live_ranks.ranks IS 'Nodes in the gang';
COMMENT ON COLUMN live_ranks.node IS 'The node';
COMMENT ON COLUMN live_ranks.gpus IS 'GPU indices on that node';
COMMENT ON COLUMN live_ranks.start_at IS 'Committed start';
COMMENT ON COLUMN live_ranks.end_at IS 'Expected end';
COMMENT ON COLUMN live_ranks.key IS 'Key of the commitment';
COMMENT ON COLUMN live_ranks.started_at IS 'When its start was claimed, or voided';
COMMENT ON COLUMN live_ranks.void IS 'True: it can never begin';
COMMENT ON COLUMN live_ranks.pid IS 'Process id of its runner';
COMMENT ON COLUMN live_ranks.outcome IS 'NULL: it has none';
COMMENT ON COLUMN live_ranks.ended_at IS 'NULL';
COMMENT ON COLUMN live_ranks.exit_code IS 'NULL';
COMMENT ON COLUMN live_ranks.cancel IS 'Whether a person wants the job to end';
COMMENT ON COLUMN live_ranks.peer_ended IS 'Whether another rank of the attempt has an outcome';

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
COMMENT ON COLUMN serving_counts.service IS 'The real-time service';
COMMENT ON COLUMN serving_counts.from_at IS 'From when on';
COMMENT ON COLUMN serving_counts.gpus IS 'GPUs it was given';

CREATE VIEW durations AS
SELECT r.job, r.kind, s.template, r.gpus, s.duration_s AS declared_s, r.seconds AS actual_s, r.ended_at
FROM runs r JOIN specs s USING (job) WHERE r.state = 'completed';
COMMENT ON VIEW durations IS 'Declared and actual durations of what completed, from which estimates learn';
COMMENT ON COLUMN durations.job IS 'The job';
COMMENT ON COLUMN durations.kind IS 'training, batch_inference or quantization';
COMMENT ON COLUMN durations.template IS 'The recurring job it is an occurrence of';
COMMENT ON COLUMN durations.gpus IS 'GPUs it ran on';
COMMENT ON COLUMN durations.declared_s IS 'Declared duration, seconds';
COMMENT ON COLUMN durations.actual_s IS 'Seconds it took';
COMMENT ON COLUMN durations.ended_at IS 'When it ended';

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
COMMENT ON COLUMN holders.job IS 'The job';
COMMENT ON COLUMN holders.kind IS 'training, batch_inference or quantization';
COMMENT ON COLUMN holders.value IS 'Worth of the job when done';
COMMENT ON COLUMN holders.priority IS 'Worth of one of its GPU-hours';
COMMENT ON COLUMN holders.duration_s IS 'Declared duration, seconds';
COMMENT ON COLUMN holders.last_attempt IS 'State of the attempt';
COMMENT ON COLUMN holders.start_at IS 'Committed start';
COMMENT ON COLUMN holders.started_at IS 'When the last rank claimed its start';
COMMENT ON COLUMN holders.end_at IS 'Expected end';
COMMENT ON COLUMN holders.over IS 'True: the attempt has ended and the job waits for the next one';
COMMENT ON COLUMN holders.nodes IS 'Its nodes and GPU indices, by rank';

CREATE VIEW forecast_errors AS
SELECT f.service, f.instant, f.step, f.ts, f.quantiles[1] AS low, f.quantiles[5] AS expected,
    f.quantiles[10] AS high, d.gpus AS actual, d.gpus - f.quantiles[5] AS error, f.method
FROM forecasts f JOIN demand d USING (service, ts);
COMMENT ON VIEW forecast_errors IS 'What was expected beside what came, for every slot that has passed';
COMMENT ON COLUMN forecast_errors.service IS 'The real-time service';
COMMENT ON COLUMN forecast_errors.instant IS 'The plan''s instant';
COMMENT ON COLUMN forecast_errors.step IS 'Slot of the horizon, 0 for the first';
COMMENT ON COLUMN forecast_errors.ts IS 'Begin of that slot';
COMMENT ON COLUMN forecast_errors.low IS 'GPUs expected, quantile .05';
COMMENT ON COLUMN forecast_errors.expected IS 'GPUs expected, quantile .45';
COMMENT ON COLUMN forecast_errors.high IS 'GPUs expected, quantile .95';
COMMENT ON COLUMN forecast_errors.actual IS 'GPUs that the load needed';
COMMENT ON COLUMN forecast_errors.error IS 'actual less expected';
COMMENT ON COLUMN forecast_errors.method IS 'The forecaster that was used';

CREATE VIEW hours AS
SELECT p.instant, p.mode, p.value AS planned_value, p.utilization AS planned_utilization, p.fifo_value,
    p.backfill_value, p.greedy_value, p.placed, p.unplaced, p.solve_ms, s.utilization, s.value, s.completed,
    s.failed, s.shortage_gpu_s
FROM plans p LEFT JOIN slots s USING (instant) WHERE p.trigger = 'hourly';
COMMENT ON VIEW hours IS 'Each planned hour: the plan, the baselines, and what happened';
COMMENT ON COLUMN hours.instant IS 'When slot 0 of the plan begins';
COMMENT ON COLUMN hours.mode IS 'Solver whose plan stands: fast or full';
COMMENT ON COLUMN hours.planned_value IS 'Value of the plan, over the whole horizon';
COMMENT ON COLUMN hours.planned_utilization IS 'Utilization of the plan, over the whole horizon';
COMMENT ON COLUMN hours.fifo_value IS 'Value that FIFO plans from the same inputs';
COMMENT ON COLUMN hours.backfill_value IS 'Value that backfill plans from them';
COMMENT ON COLUMN hours.greedy_value IS 'Value that backfill with our forecast plans';
COMMENT ON COLUMN hours.placed IS 'Jobs in the plan';
COMMENT ON COLUMN hours.unplaced IS 'Jobs left out';
COMMENT ON COLUMN hours.solve_ms IS 'Milliseconds the solver took';
COMMENT ON COLUMN hours.utilization IS 'What was busy of all GPU-seconds until the next plan';
COMMENT ON COLUMN hours.value IS 'Value of the jobs that completed in time';
COMMENT ON COLUMN hours.completed IS 'Jobs that completed';
COMMENT ON COLUMN hours.failed IS 'Attempts that ended otherwise';
COMMENT ON COLUMN hours.shortage_gpu_s IS 'GPU-seconds that services wanted and did not get';
