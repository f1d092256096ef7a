-- The same views, quick with years in them: an attempt on one node, as most are, needs no grouping, and a job's last
-- attempt is found by its number.

CREATE OR REPLACE VIEW attempts AS
SELECT job, attempt, instant, key, start_at, end_at, ranks, [node] AS nodes, len(gpus)::INTEGER AS gpus,
    (started_at IS NOT NULL AND NOT void)::BIGINT AS started, (outcome IS NOT NULL)::BIGINT AS ended,
    CASE WHEN NOT void THEN started_at END AS started_at, ended_at, coalesce(exit_code = 2, false) AS wrong_spec,
    CASE WHEN outcome IS NOT NULL THEN outcome WHEN started_at IS NOT NULL AND NOT void THEN 'running'
        ELSE 'committed' END AS state
FROM ranks WHERE ranks = 1
UNION ALL
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
FROM ranks WHERE ranks > 1 GROUP BY job, attempt;
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

CREATE OR REPLACE VIEW jobs AS
WITH tries AS (
    SELECT job, count(*) FILTER (state IN ('failed', 'crashed', 'lost', 'stopped')) AS failures,
        max(attempt) AS attempts
    FROM attempts GROUP BY job
), last AS (
    SELECT a.*, t.failures, t.attempts FROM attempts a JOIN tries t ON t.job = a.job AND t.attempts = a.attempt
), requests AS (
    SELECT job, min(recorded_at) AS cancel_at FROM cancels GROUP BY job
)
SELECT
    s.job, s.kind, s.tenant, s.gpus, s.priority, s.value, s.duration_s, s.max_duration_s, s.submitted_at,
    s.release_at, s.deadline_at, s.gpu_types, s.max_attempts, s.template, s.key AS spec_key, s.source,
    coalesce(l.attempts, 0)::INTEGER AS attempts, coalesce(l.failures, 0)::INTEGER AS failures,
    CASE
        WHEN l.state IN ('committed', 'starting', 'running', 'ending', 'completed', 'cancelled') THEN l.state
        WHEN r.cancel_at IS NOT NULL OR series.cancel_at IS NOT NULL THEN 'cancelled'
        WHEN l.state = 'timed_out' OR l.wrong_spec OR l.failures >= s.max_attempts THEN 'failed'
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

CREATE OR REPLACE VIEW runs AS
SELECT
    o.job, o.attempt, s.kind, s.tenant, s.priority, a.nodes, a.gpus, a.state, o.started_at, o.ended_at,
    date_diff('millisecond', o.started_at, o.ended_at) / 1000 AS seconds,
    o.gpu_seconds, o.cost, o.mfu, o.tokens_per_s, o.rows_per_s, o.loss, s.value, o.error, o.metrics
FROM outcomes o JOIN attempts a USING (job, attempt) JOIN specs s USING (job) WHERE a.ranks = 1
UNION ALL
SELECT
    o.job, o.attempt, s.kind, s.tenant, s.priority, any_value(a.nodes) AS nodes, any_value(a.gpus) AS gpus,
    any_value(a.state) AS state, min(o.started_at) AS started_at, max(o.ended_at) AS ended_at,
    date_diff('millisecond', min(o.started_at), max(o.ended_at)) / 1000 AS seconds,
    sum(o.gpu_seconds) AS gpu_seconds, sum(o.cost) AS cost, avg(o.mfu) AS mfu, sum(o.tokens_per_s) AS tokens_per_s,
    sum(o.rows_per_s) AS rows_per_s, arg_min(o.loss, o.rank) AS loss, any_value(s.value) AS value,
    string_agg(o.error, '; ' ORDER BY o.rank) AS error, arg_min(o.metrics, o.rank) AS metrics
FROM outcomes o JOIN attempts a USING (job, attempt) JOIN specs s USING (job) WHERE a.ranks > 1
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

CREATE OR REPLACE VIEW live_ranks AS
SELECT r.*, EXISTS (FROM cancels c WHERE c.job = r.job) AS cancel,
    EXISTS (FROM outcomes o WHERE o.job = r.job AND o.attempt = r.attempt AND o.rank <> r.rank) AS peer_ended
FROM ranks r WHERE r.outcome IS NULL;
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

CREATE OR REPLACE VIEW holders AS
WITH held AS (
    SELECT * FROM jobs WHERE state IN ('queued', 'committed', 'starting', 'running', 'ending') AND attempts > 0
)
SELECT
    j.job, j.kind, j.value, j.priority, j.duration_s, j.last_attempt, a.start_at, a.started_at, a.end_at,
    a.ended = a.ranks AS over, list({'node': r.node, 'gpus': r.gpus} ORDER BY r.rank) AS nodes
FROM held j
JOIN attempts a ON a.job = j.job AND a.attempt = j.attempts
JOIN allocations r ON r.job = a.job AND r.attempt = a.attempt
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

CREATE TABLE packs (key VARCHAR PRIMARY KEY, facts INTEGER NOT NULL);
COMMENT ON TABLE packs IS 'Objects in storage that hold many facts of a day that is over, and were taken in';
COMMENT ON COLUMN packs.key IS 'Key of the object';
COMMENT ON COLUMN packs.facts IS 'How many facts it holds';

CREATE TABLE details (kept_from TIMESTAMPTZ NOT NULL);
COMMENT ON TABLE details IS 'From when on forecasts and planned_jobs are kept here; the facts keep all. One row, or none yet';
COMMENT ON COLUMN details.kept_from IS 'Plans before this instant have no rows in those two tables';
