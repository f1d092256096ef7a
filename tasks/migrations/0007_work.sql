-- What a job has to do, and how fast such work went. Some ledgers of version 5 have the columns already.

ALTER TABLE specs ADD COLUMN IF NOT EXISTS work DOUBLE;
ALTER TABLE specs ADD COLUMN IF NOT EXISTS precision VARCHAR;
COMMENT ON COLUMN specs.work IS 'What there is to do, if it can be told: FLOPs, most new tokens of all rows, bytes of the model';
COMMENT ON COLUMN specs.precision IS 'For training with known work: the precision, on which the peak of a GPU depends';

CREATE OR REPLACE VIEW durations AS
WITH done AS (
    SELECT r.*, s.template, s.duration_s, s.work, TRY_CAST(r.metrics ->> 'peak_flops_per_s' AS DOUBLE) AS peak
    FROM runs r JOIN specs s USING (job) WHERE r.state = 'completed'
)
SELECT job, kind, template, gpus, duration_s AS declared_s, seconds AS actual_s, ended_at, tenant,
    CASE WHEN kind <> 'training' OR peak > 0 THEN work END AS work,
    CASE kind WHEN 'training' THEN mfu WHEN 'batch_inference' THEN tokens_per_s / gpus
        ELSE work / nullif(seconds * gpus, 0) END AS speed,
    CASE WHEN kind = 'training' THEN peak END AS peak_per_s
FROM done;
COMMENT ON VIEW durations IS 'Declared and actual durations of what completed, from which estimates learn';
COMMENT ON COLUMN durations.job IS 'The job';
COMMENT ON COLUMN durations.kind IS 'training, batch_inference or quantization';
COMMENT ON COLUMN durations.template IS 'The recurring job it is an occurrence of';
COMMENT ON COLUMN durations.gpus IS 'GPUs it ran on';
COMMENT ON COLUMN durations.declared_s IS 'Declared duration, seconds';
COMMENT ON COLUMN durations.actual_s IS 'Seconds it took';
COMMENT ON COLUMN durations.ended_at IS 'When it ended';
COMMENT ON COLUMN durations.tenant IS 'Whose job it was';
COMMENT ON COLUMN durations.work IS 'What it had to do, as in specs';
COMMENT ON COLUMN durations.speed IS 'Training: MFU. Else tokens or bytes per second and GPU';
COMMENT ON COLUMN durations.peak_per_s IS 'Training: the peak that the MFU is a share of, FLOP/s of one GPU';
