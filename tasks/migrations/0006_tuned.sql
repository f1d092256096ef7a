-- What training jobs found out about their levers.

CREATE VIEW tuned AS
SELECT
    metrics->>'model' AS model, metrics->>'gpu_type' AS gpu_type, TRY_CAST(metrics->>'processes' AS INTEGER) AS processes,
    metrics->>'versions' AS versions, metrics->>'tuned' AS origin, metrics->>'levers' AS levers,
    TRY_CAST(metrics->>'plain_mfu' AS DOUBLE) AS plain_mfu, mfu,
    TRY_CAST(metrics->>'plain_tokens_per_s' AS DOUBLE) AS plain_tokens_per_s, tokens_per_s,
    TRY_CAST(metrics->>'gain' AS DOUBLE) AS gain, gpu_seconds, cost, job, attempt, ended_at
FROM runs WHERE kind = 'training' AND (metrics->>'tuned') <> 'no';
COMMENT ON VIEW tuned IS 'Training runs whose levers were measured: what was on, and the plain loop beside it';
COMMENT ON COLUMN tuned.model IS 'As the configuration names it';
COMMENT ON COLUMN tuned.gpu_type IS 'GPUs it ran on';
COMMENT ON COLUMN tuned.processes IS 'How many, one process each';
COMMENT ON COLUMN tuned.versions IS 'Of Python and of what computes, as JSON';
COMMENT ON COLUMN tuned.origin IS 'measured: by this job; else the job that had measured the same before';
COMMENT ON COLUMN tuned.levers IS 'Those that were on, as JSON';
COMMENT ON COLUMN tuned.plain_mfu IS 'MFU of the plain loop, of the fp32 peak';
COMMENT ON COLUMN tuned.mfu IS 'MFU of the run, of the peak named in its metrics';
COMMENT ON COLUMN tuned.plain_tokens_per_s IS 'Speed of the plain loop on the same hardware and batch; NULL where it does not run';
COMMENT ON COLUMN tuned.tokens_per_s IS 'Speed of the run';
COMMENT ON COLUMN tuned.gain IS 'The second over the first';
COMMENT ON COLUMN tuned.gpu_seconds IS 'GPUs x seconds held';
COMMENT ON COLUMN tuned.cost IS 'gpu_seconds at the nodes'' prices';
COMMENT ON COLUMN tuned.job IS 'The job';
COMMENT ON COLUMN tuned.attempt IS '1 for the first attempt';
COMMENT ON COLUMN tuned.ended_at IS 'When it ended';
