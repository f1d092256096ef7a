-- What compares the policies of a replay. Each policy's own tables and views lie in the schema of its name.

CREATE TABLE replayed_jobs (
    policy VARCHAR NOT NULL, job VARCHAR NOT NULL, kind VARCHAR NOT NULL, tenant VARCHAR, gpus INTEGER NOT NULL,
    priority DOUBLE NOT NULL, value DOUBLE NOT NULL, declared_s DOUBLE, duration_s DOUBLE NOT NULL,
    estimate_s DOUBLE, submitted_at TIMESTAMPTZ NOT NULL, started_at TIMESTAMPTZ, ended_at TIMESTAMPTZ,
    attempts INTEGER NOT NULL, state VARCHAR NOT NULL, earned DOUBLE NOT NULL, wait_s DOUBLE NOT NULL
);
COMMENT ON TABLE replayed_jobs IS 'Every job of the window under every policy';
COMMENT ON COLUMN replayed_jobs.value IS 'priority x true GPU-hours';
COMMENT ON COLUMN replayed_jobs.estimate_s IS 'What the policy expected the job to take when it last planned it';
COMMENT ON COLUMN replayed_jobs.state IS 'completed, running, queued, expired, failed, or rejected when it fits no node';
COMMENT ON COLUMN replayed_jobs.earned IS 'Its value if it completed in time and in the window, else 0';
COMMENT ON COLUMN replayed_jobs.wait_s IS 'From its submission to its last start, or to the end of the window';

CREATE TABLE replayed_hours (
    policy VARCHAR NOT NULL, instant TIMESTAMPTZ NOT NULL, queued INTEGER NOT NULL, running INTEGER NOT NULL,
    kept INTEGER NOT NULL, moved INTEGER NOT NULL, replans INTEGER NOT NULL, utilization DOUBLE NOT NULL,
    value DOUBLE NOT NULL, completed INTEGER NOT NULL, demand_gpu_s DOUBLE NOT NULL,
    shortage_gpu_s DOUBLE NOT NULL, serving_gpus INTEGER NOT NULL
);
COMMENT ON TABLE replayed_hours IS 'Every hour under every policy';
COMMENT ON COLUMN replayed_hours.kept IS 'Starts that the plan of the hour before advised and this one keeps';
COMMENT ON COLUMN replayed_hours.moved IS 'Starts that it advised and this one moves by a slot or more, or drops';
COMMENT ON COLUMN replayed_hours.replans IS 'Light re-plans in the hour';
COMMENT ON COLUMN replayed_hours.serving_gpus IS 'GPUs that services held at its end';

CREATE TABLE replayed_solves (
    policy VARCHAR NOT NULL, instant TIMESTAMPTZ NOT NULL, trigger VARCHAR NOT NULL, jobs INTEGER NOT NULL,
    solve_ms DOUBLE NOT NULL
);
COMMENT ON TABLE replayed_solves IS 'Every plan: what made it, jobs that it considered, milliseconds';

CREATE TABLE replayed_policies (
    policy VARCHAR NOT NULL, value DOUBLE NOT NULL, utilization DOUBLE NOT NULL, completed INTEGER NOT NULL,
    shortage_gpu_slots DOUBLE NOT NULL, demand_gpu_slots DOUBLE NOT NULL, mean_wait_s DOUBLE NOT NULL,
    seconds DOUBLE NOT NULL, jobs INTEGER NOT NULL, rejected INTEGER NOT NULL, started INTEGER NOT NULL,
    offered_value DOUBLE NOT NULL, net_value DOUBLE NOT NULL, mean_wait_started_s DOUBLE NOT NULL, short_share DOUBLE NOT NULL, served_share DOUBLE NOT NULL,
    batch_utilization DOUBLE NOT NULL, lost_attempts INTEGER NOT NULL
);
COMMENT ON TABLE replayed_policies IS 'The account of every policy';
COMMENT ON COLUMN replayed_policies.mean_wait_s IS 'Mean over all jobs; those not started wait to the end of the window';
COMMENT ON COLUMN replayed_policies.net_value IS 'value less priority x shortage_penalty for each GPU-hour that a service lacked';
COMMENT ON COLUMN replayed_policies.short_share IS 'Share of slots in which a service lacked a GPU';
COMMENT ON COLUMN replayed_policies.served_share IS 'Share of the GPU-seconds that services wanted and got';

CREATE VIEW waiting AS
SELECT policy, priority, gpus, count(*) AS jobs, count(started_at) AS started, avg(wait_s) AS mean_wait_s,
    median(wait_s) AS median_wait_s, quantile_cont(wait_s, 0.9) AS wait_p90_s
FROM replayed_jobs WHERE state <> 'rejected' GROUP BY policy, priority, gpus ORDER BY ALL;
COMMENT ON VIEW waiting IS 'Waiting time by policy, priority and GPU count';

CREATE VIEW solving AS
SELECT policy, trigger, count(*) AS plans, avg(jobs) AS mean_jobs, median(solve_ms) AS median_ms,
    quantile_cont(solve_ms, 0.95) AS p95_ms, max(solve_ms) AS most_ms
FROM replayed_solves GROUP BY policy, trigger ORDER BY ALL;
COMMENT ON VIEW solving IS 'How often each policy planned, and the milliseconds that it took';

CREATE VIEW changes AS
SELECT policy, sum(kept)::BIGINT AS kept, sum(moved)::BIGINT AS moved,
    sum(moved) / nullif(sum(kept) + sum(moved), 0) AS moved_share
FROM replayed_hours GROUP BY policy ORDER BY ALL;
COMMENT ON VIEW changes IS 'Starts that a plan advised for later hours, and what the plan of the next hour made of them';
COMMENT ON COLUMN changes.moved IS 'Moved by a slot or more, or dropped';

CREATE VIEW forecast_quality AS
SELECT service, ceil(epoch(ts - instant) / 3600 + 1e-6)::INTEGER AS hours_ahead, count(*) AS slots,
    avg(abs(error)) AS mean_error, avg(actual) AS mean_actual,
    avg((actual BETWEEN low AND high)::INTEGER) AS inside
FROM forecast_errors GROUP BY ALL ORDER BY ALL;
COMMENT ON VIEW forecast_quality IS 'The forecast against what came, by the distance in hours; all policies have the same forecast';
COMMENT ON COLUMN forecast_quality.mean_error IS 'Mean of |what came - quantile .45|, GPUs';
COMMENT ON COLUMN forecast_quality.inside IS 'Share that came between the quantiles .05 and .95';
