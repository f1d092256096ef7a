ALTER TABLE forecasts ADD COLUMN forecaster VARCHAR;
ALTER TABLE forecasts ADD COLUMN coverage DOUBLE;
COMMENT ON COLUMN forecasts.forecaster IS 'The forecaster that was chosen; its losses are in forecaster_losses';
COMMENT ON COLUMN forecasts.coverage IS 'Share of the slots of the last seven seasons whose demand was known; missing is not zero';

CREATE TABLE tournament (
    instant TIMESTAMPTZ NOT NULL, service VARCHAR NOT NULL, forecaster VARCHAR NOT NULL, ts TIMESTAMPTZ NOT NULL,
    until TIMESTAMPTZ NOT NULL, quantiles DOUBLE[] NOT NULL
);
COMMENT ON TABLE tournament IS 'What every forecaster expected of a few slots, chosen or not';
COMMENT ON COLUMN tournament.instant IS 'The plan''s instant';
COMMENT ON COLUMN tournament.service IS 'The real-time service';
COMMENT ON COLUMN tournament.forecaster IS 'The forecaster';
COMMENT ON COLUMN tournament.ts IS 'Begin of the slot';
COMMENT ON COLUMN tournament.until IS 'Its end';
COMMENT ON COLUMN tournament.quantiles IS 'GPUs wanted, quantiles .05, .15, ... .95';

CREATE VIEW forecaster_losses AS
WITH judged AS (
    SELECT t.*, avg(d.gpus) AS actual
    FROM tournament t JOIN demand d ON d.service = t.service AND d.ts >= t.ts AND d.ts < t.until
    GROUP BY ALL
)
SELECT instant, service, forecaster, ts, actual,
    list_avg(list_transform(
        range(1, 11),
        lambda i: 2 * greatest((i - 0.5) / 10 * (actual - quantiles[i]), ((i - 0.5) / 10 - 1) * (actual - quantiles[i]))
    )) AS loss
FROM judged;
COMMENT ON VIEW forecaster_losses IS 'How far each forecaster was off, for every slot that has passed and was recorded of all of them';
COMMENT ON COLUMN forecaster_losses.instant IS 'The plan''s instant';
COMMENT ON COLUMN forecaster_losses.service IS 'The real-time service';
COMMENT ON COLUMN forecaster_losses.forecaster IS 'The forecaster';
COMMENT ON COLUMN forecaster_losses.ts IS 'Begin of the slot';
COMMENT ON COLUMN forecaster_losses.actual IS 'GPUs that the load needed';
COMMENT ON COLUMN forecaster_losses.loss IS 'Twice the mean pinball loss of its ten quantiles, GPUs';

CREATE OR REPLACE VIEW durations AS
SELECT r.job, r.kind, s.template, r.gpus, s.duration_s AS declared_s, r.seconds AS actual_s, r.ended_at, s.tenant
FROM runs r JOIN specs s USING (job) WHERE r.state = 'completed';
COMMENT ON VIEW durations IS 'Declared and actual durations of what completed, from which estimates learn';
COMMENT ON COLUMN durations.job IS 'The job';
COMMENT ON COLUMN durations.kind IS 'training, batch_inference or quantization';
COMMENT ON COLUMN durations.template IS 'The recurring job it is an occurrence of';
COMMENT ON COLUMN durations.gpus IS 'GPUs it ran on';
COMMENT ON COLUMN durations.declared_s IS 'Declared duration, seconds';
COMMENT ON COLUMN durations.actual_s IS 'Seconds it took';
COMMENT ON COLUMN durations.ended_at IS 'When it ended';
COMMENT ON COLUMN durations.tenant IS 'Whose job it was';
