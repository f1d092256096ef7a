-- What training was predicted to take, the widths that a job may have, where a step's time goes and what tuning saved.

ALTER TABLE specs ADD COLUMN widths INTEGER[];
ALTER TABLE specs ADD COLUMN predicted JSON;
ALTER TABLE specs ADD COLUMN unpredicted VARCHAR[];
COMMENT ON COLUMN specs.widths IS 'For an elastic job: the numbers of GPUs that it may have; the first, gpus, sets its value';
COMMENT ON COLUMN specs.predicted IS 'Of training: what the performance model expects on each GPU type and width (see predictions)';
COMMENT ON COLUMN specs.unpredicted IS 'Why it expects nothing of the others, in words';

CREATE OR REPLACE VIEW durations AS
WITH done AS (
    SELECT r.*, s.template, s.duration_s, s.work, s.gpus AS asked_gpus, s.predicted, r.metrics ->> 'gpu_type' AS gpu,
        TRY_CAST(r.metrics ->> 'peak_flops_per_s' AS DOUBLE) AS peak
    FROM runs r JOIN specs s USING (job) WHERE r.state = 'completed'
)
SELECT job, kind, template, gpus, duration_s AS declared_s, seconds AS actual_s, ended_at, tenant,
    CASE WHEN kind <> 'training' OR peak > 0 THEN work END AS work,
    CASE kind WHEN 'training' THEN mfu WHEN 'batch_inference' THEN tokens_per_s / gpus
        ELSE work / nullif(seconds * gpus, 0) END AS speed,
    CASE WHEN kind = 'training' THEN peak END AS peak_per_s, asked_gpus,
    list_filter(
        from_json(predicted, '[{"gpu": "VARCHAR", "gpus": "INTEGER", "seconds": "DOUBLE"}]'),
        lambda p: p.gpu = done.gpu AND p.gpus = done.gpus
    )[1].seconds AS predicted_s
FROM done;
COMMENT ON VIEW durations IS 'Declared, predicted and actual durations of what completed, from which estimates learn';
COMMENT ON COLUMN durations.job IS 'The job';
COMMENT ON COLUMN durations.kind IS 'training, batch_inference or quantization';
COMMENT ON COLUMN durations.template IS 'The recurring job it is an occurrence of';
COMMENT ON COLUMN durations.gpus IS 'GPUs it ran on';
COMMENT ON COLUMN durations.declared_s IS 'Declared duration, seconds, for asked_gpus';
COMMENT ON COLUMN durations.actual_s IS 'Seconds it took';
COMMENT ON COLUMN durations.ended_at IS 'When it ended';
COMMENT ON COLUMN durations.tenant IS 'Whose job it was';
COMMENT ON COLUMN durations.work IS 'What it had to do, as in specs';
COMMENT ON COLUMN durations.speed IS 'Training: MFU. Else tokens or bytes per second and GPU';
COMMENT ON COLUMN durations.peak_per_s IS 'Training: the peak that the MFU is a share of, FLOP/s of one GPU';
COMMENT ON COLUMN durations.asked_gpus IS 'GPUs it asked for first';
COMMENT ON COLUMN durations.predicted_s IS 'Training: seconds that were predicted for the GPUs it ran on';

CREATE VIEW predictions AS
WITH expected AS (
    SELECT job, unnest(from_json(predicted, '[{
        "gpu": "VARCHAR", "gpus": "INTEGER", "seconds": "DOUBLE", "low": "DOUBLE", "high": "DOUBLE", "mfu": "DOUBLE",
        "reason": "VARCHAR"
    }]'), recursive := true)
    FROM specs WHERE schedule IS NULL
)
SELECT e.*, d.actual_s FROM expected e
LEFT JOIN durations d ON d.job = e.job AND d.gpus = e.gpus AND d.predicted_s = e.seconds;
COMMENT ON VIEW predictions IS 'What the performance model expected of training jobs, and what those that completed took';
COMMENT ON COLUMN predictions.job IS 'The job';
COMMENT ON COLUMN predictions.gpu IS 'The GPU type';
COMMENT ON COLUMN predictions.gpus IS 'How many of them';
COMMENT ON COLUMN predictions.seconds IS 'Expected seconds, before any outcome corrects them';
COMMENT ON COLUMN predictions.low IS 'Nine of ten runs should take longer than this';
COMMENT ON COLUMN predictions.high IS 'And less than this';
COMMENT ON COLUMN predictions.mfu IS 'Expected MFU, 0 to 1, causal convention';
COMMENT ON COLUMN predictions.reason IS 'The same in words';
COMMENT ON COLUMN predictions.actual_s IS 'Seconds that it took, if it ran so and completed';

CREATE VIEW step_times AS
SELECT job, attempt, metrics ->> 'model' AS model, metrics ->> 'gpu_type' AS gpu, gpus, mfu,
    TRY_CAST(steps ->> 'compute' AS DOUBLE) AS compute_ms, TRY_CAST(steps ->> 'optimizer' AS DOUBLE) AS optimizer_ms,
    TRY_CAST(steps ->> 'copies' AS DOUBLE) AS copies_ms,
    TRY_CAST(steps ->> 'communication' AS DOUBLE) AS communication_ms,
    TRY_CAST(steps ->> 'data' AS DOUBLE) AS data_ms, TRY_CAST(steps ->> 'idle' AS DOUBLE) AS idle_ms,
    TRY_CAST(causes ->> 'memory movement' AS DOUBLE) AS memory_movement_points,
    TRY_CAST(causes ->> 'unfilled hardware' AS DOUBLE) AS unfilled_hardware_points,
    TRY_CAST(causes ->> 'communication' AS DOUBLE) AS communication_points,
    metrics ->> 'bottleneck' AS bottleneck, metrics ->> 'next_lever' AS next_lever,
    metrics ->> 'next_lever_why' AS next_lever_why, ended_at
FROM (
    SELECT *, TRY_CAST(metrics ->> 'step_ms' AS JSON) AS steps, TRY_CAST(metrics ->> 'three_causes' AS JSON) AS causes
    FROM runs WHERE kind = 'training'
) WHERE steps IS NOT NULL;
COMMENT ON VIEW step_times IS 'Where a step of each training run went, from a few profiled steps of it, and what to try next';
COMMENT ON COLUMN step_times.job IS 'The job';
COMMENT ON COLUMN step_times.attempt IS '1 for the first attempt';
COMMENT ON COLUMN step_times.model IS 'As the configuration names it';
COMMENT ON COLUMN step_times.gpu IS 'GPU type it ran on';
COMMENT ON COLUMN step_times.gpus IS 'How many';
COMMENT ON COLUMN step_times.mfu IS 'MFU of the whole run';
COMMENT ON COLUMN step_times.compute_ms IS 'Milliseconds of a step, mean over the ranks: computing';
COMMENT ON COLUMN step_times.optimizer_ms IS 'The optimizer, as far as nothing else ran';
COMMENT ON COLUMN step_times.copies_ms IS 'Copies between host and device that nothing hid';
COMMENT ON COLUMN step_times.communication_ms IS 'Collectives that nothing hid';
COMMENT ON COLUMN step_times.data_ms IS 'Waiting for data';
COMMENT ON COLUMN step_times.idle_ms IS 'Nothing at all: the host was late';
COMMENT ON COLUMN step_times.memory_movement_points IS 'MFU points that data and copies cost';
COMMENT ON COLUMN step_times.unfilled_hardware_points IS 'MFU points that idle time and slow kernels cost';
COMMENT ON COLUMN step_times.communication_points IS 'MFU points that exposed collectives cost';
COMMENT ON COLUMN step_times.bottleneck IS 'The same in words; stragglers are named';
COMMENT ON COLUMN step_times.next_lever IS 'Line of the configuration that the diagnosis proposes to try';
COMMENT ON COLUMN step_times.next_lever_why IS 'Why that one';
COMMENT ON COLUMN step_times.ended_at IS 'When the run ended';

CREATE VIEW savings AS
SELECT job, attempt, metrics ->> 'model' AS model, metrics ->> 'gpu_type' AS gpu, gpus,
    TRY_CAST(metrics ->> 'plain_mfu' AS DOUBLE) AS plain_mfu, mfu, TRY_CAST(metrics ->> 'gain' AS DOUBLE) AS gain,
    gpu_seconds / 3600 AS gpu_hours, cost, gpu_seconds / 3600 + saved_gpu_hours AS plain_gpu_hours,
    cost + saved_gpu_hours * price AS plain_cost, saved_gpu_hours, saved_gpu_hours * price AS saved,
    saved_gpu_hours / (gpu_seconds / 3600 + saved_gpu_hours) AS saved_share, ended_at
FROM (
    SELECT *, TRY_CAST(metrics ->> 'saved_gpu_hours' AS DOUBLE) AS saved_gpu_hours,
        cost * 3600 / nullif(gpu_seconds, 0) AS price
    FROM runs WHERE kind = 'training' AND state = 'completed'
) WHERE saved_gpu_hours IS NOT NULL;
COMMENT ON VIEW savings IS 'Training runs whose plain baseline was measured: what they cost, and what the plain loop would have';
COMMENT ON COLUMN savings.job IS 'The job';
COMMENT ON COLUMN savings.attempt IS '1 for the first attempt';
COMMENT ON COLUMN savings.model IS 'As the configuration names it';
COMMENT ON COLUMN savings.gpu IS 'GPU type it ran on';
COMMENT ON COLUMN savings.gpus IS 'How many';
COMMENT ON COLUMN savings.plain_mfu IS 'MFU of the plain loop, of the fp32 peak';
COMMENT ON COLUMN savings.mfu IS 'MFU of the run, of the peak named in its metrics';
COMMENT ON COLUMN savings.gain IS 'Tokens per second over the plain loop''s';
COMMENT ON COLUMN savings.gpu_hours IS 'GPUs x hours held, start and measuring of levers included';
COMMENT ON COLUMN savings.cost IS 'gpu_hours at the nodes'' prices';
COMMENT ON COLUMN savings.plain_gpu_hours IS 'What the same tokens would have taken with the plain loop';
COMMENT ON COLUMN savings.plain_cost IS 'At the same prices';
COMMENT ON COLUMN savings.saved_gpu_hours IS 'The difference; negative when measuring took longer than was won';
COMMENT ON COLUMN savings.saved IS 'At the same prices';
COMMENT ON COLUMN savings.saved_share IS 'Of the plain loop''s cost';
COMMENT ON COLUMN savings.ended_at IS 'When the run ended';
