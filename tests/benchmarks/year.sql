-- A year of hours as facts would have made it: run number i is committed in slot i * slots // runs; one in fifty failed
-- at first. Variables: begin, slots, runs, details (days of which forecasts and planned jobs are kept).

CREATE TEMP TABLE r AS SELECT i, 'job-' || i AS job, getvariable('begin') + to_hours(CAST(i * getvariable('slots') // getvariable('runs') AS INTEGER))
    AS instant, 'node' || (i % 64) AS node, (i % 50 = 0) AS failed FROM range(getvariable('runs')) t(i);
INSERT INTO specs BY NAME SELECT job, NULL AS template, NULL AS schedule, 'training' AS kind, 1 + i % 8 AS gpus, 5.0 AS priority,
    10.0 AS value, 3600.0 AS duration_s, NULL AS max_duration_s, instant AS release_at, NULL AS deadline_at, NULL AS gpu_types,
    'tenant' || (i % 10) AS tenant, 3 AS max_attempts, instant AS submitted_at, job || '.yaml' AS source, md5(job) || md5(node) AS sha256,
    '{"id": "' || job || '", "kind": "training", "gpus": 1, "priority": 5.0, "duration": "1h", "command": ["python", "train.py"]}' AS spec,
    'facts/' || strftime(instant, '%Y-%m-%d') || '/spec/' || job || '.json' AS key FROM r;
CREATE TEMP TABLE a AS SELECT *, 1 AS attempt FROM r UNION ALL BY NAME SELECT *, 2 AS attempt FROM r WHERE failed;
INSERT INTO allocations BY NAME SELECT instant, job, attempt, 0 AS rank, 1 AS ranks, node, [i % 8] AS gpus, instant AS start_at,
    instant + INTERVAL 1 HOUR AS end_at,
    'facts/' || strftime(instant, '%Y-%m-%d') || '/commit/' || strftime(instant, '%Y-%m-%dT%H:%M:%SZ') || '.json' AS key FROM a;
INSERT INTO dispatches BY NAME SELECT job, attempt, 0 AS rank, node, md5(job) AS flow_run, instant AS recorded_at FROM a;
INSERT INTO starts BY NAME SELECT job, attempt, 0 AS rank, node, false AS void, NULL AS reason, 7 AS pid, instant AS recorded_at FROM a;
INSERT INTO outcomes BY NAME SELECT job, attempt, 0 AS rank, node, if(failed AND attempt = 1, 'failed', 'completed') AS state,
    instant AS started_at, instant + to_minutes(20 + i % 40) AS ended_at, 1800.0 AS gpu_seconds, 1.0 AS cost, 0 AS exit_code,
    NULL AS error, 0.3 + (i % 100) / 500 AS mfu, 1e4 AS tokens_per_s, NULL AS rows_per_s, 2.0 AS loss,
    '{"mfu": 0.4, "tokens_per_s": 10000, "peak": "H100 SXM bf16 989 TFLOP/s", "steps": 1000, "loss": 2.0}' AS metrics FROM a;
CREATE TEMP TABLE s AS SELECT i, getvariable('begin') + to_hours(i::INTEGER) AS instant FROM range(getvariable('slots')) t(i);
INSERT INTO plans BY NAME SELECT instant, 'hourly' AS trigger, 'full' AS mode, 10 AS slot_minutes, 144 AS slots, 1.0 AS objective,
    NULL AS bound, 1.0 AS value, 0.9 AS utilization, 0.0 AS shortage, 10.0 AS solve_ms, 20 AS placed, 30 AS unplaced, 1.0 AS fifo_value,
    0.7 AS fifo_utilization, 1.0 AS fifo_objective, 1.0 AS backfill_value, 0.8 AS backfill_utilization, 1.0 AS backfill_objective,
    1.0 AS greedy_value, 0.85 AS greedy_utilization, 1.0 AS greedy_objective, i AS considered, []::VARCHAR[] AS warnings FROM s;
INSERT INTO demand_samples BY NAME SELECT 'chat' AS service, instant + to_minutes(m::INTEGER * 10) AS ts, 100.0 AS value,
    5 + 3 * sin(i / 24) AS gpus, 'observed' AS origin, instant + INTERVAL 1 HOUR AS recorded_at FROM s, range(6) t(m);
INSERT INTO serving BY NAME SELECT instant, 'chat' AS service, instant AS from_at, 'node0' AS node, [0, 1, 2] AS gpus FROM s;
INSERT INTO forecasts BY NAME SELECT instant, 'chat' AS service, k AS step, instant + to_minutes(k::INTEGER * 10) AS ts,
    [1.1, 2.1, 3.1, 4.1, 5.1, 6.1, 7.1, 8.1, 9.1, 9.9] AS quantiles, 'seasonal' AS method, 'enough history' AS reason
    FROM s, range(144) t(k) WHERE instant > (SELECT max(instant) FROM s) - to_days(getvariable('details')::INTEGER);
INSERT INTO planned_jobs BY NAME SELECT instant, 'job-' || (i * 23 + k) AS job, instant AS start_at, instant + INTERVAL 1 HOUR AS end_at,
    [1, 2] AS gpus, NULL AS reason, NULL AS earliest_start_at
    FROM s, range(50) t(k) WHERE instant > (SELECT max(instant) FROM s) - to_days(getvariable('details')::INTEGER);
INSERT INTO facts BY NAME
    SELECT key, instant::DATE AS day, 'spec' AS kind, instant AS recorded_at FROM specs JOIN r USING (job)
    UNION ALL BY NAME SELECT 'facts/' || instant::DATE || '/' || kind || '/' || job || '/' || attempt || '/0.json' AS key,
        instant::DATE AS day, kind, instant AS recorded_at FROM a, (VALUES ('dispatch'), ('started'), ('outcome')) k(kind)
    UNION ALL BY NAME SELECT 'facts/' || instant::DATE || '/' || kind || '/' || strftime(instant, '%Y-%m-%dT%H:%M:%SZ') || '.json' AS key,
        instant::DATE AS day, kind, instant AS recorded_at FROM s, (VALUES ('commit'), ('plan'), ('forecast'), ('slot')) k(kind);
INSERT INTO slots BY NAME SELECT instant, instant + INTERVAL 1 HOUR AS until, 512 AS gpus, 20 AS completed, 1 AS failed, 1.0 AS busy_gpu_s,
    1.0 AS serving_gpu_s, 0.9 AS utilization, 1.0 AS demand_gpu_s, 0.0 AS shortage_gpu_s, 5.0 AS value, instant + INTERVAL 1 HOUR AS recorded_at FROM s;
