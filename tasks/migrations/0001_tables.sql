-- One append-only table for each kind of fact. What changes (the state of a job) is a view over them.

COMMENT ON TABLE schema_versions IS 'Migrations that were applied to this database';
COMMENT ON COLUMN schema_versions.version IS 'Number of the migration''s file';

CREATE TABLE facts (key VARCHAR PRIMARY KEY, day DATE NOT NULL, kind VARCHAR NOT NULL, recorded_at TIMESTAMPTZ);
COMMENT ON TABLE facts IS 'Every fact taken in from storage; all other tables are made from these objects';
COMMENT ON COLUMN facts.key IS 'Key of the object in storage';
COMMENT ON COLUMN facts.day IS 'Partition: the UTC day in the key';
COMMENT ON COLUMN facts.kind IS 'Kind of fact, which decides the table its rows go to';
COMMENT ON COLUMN facts.recorded_at IS 'When its writer wrote it, by the writer''s clock';

CREATE TABLE bad_facts (key VARCHAR PRIMARY KEY, day DATE, error VARCHAR NOT NULL);
COMMENT ON TABLE bad_facts IS 'Objects under facts/ that could not be read; they are left where they are';
COMMENT ON COLUMN bad_facts.key IS 'Key of the object in storage';
COMMENT ON COLUMN bad_facts.day IS 'The UTC day in the key, if it has one';
COMMENT ON COLUMN bad_facts.error IS 'What is wrong with it';

CREATE TABLE specs (
    job VARCHAR NOT NULL, template VARCHAR, schedule VARCHAR, kind VARCHAR NOT NULL, gpus INTEGER NOT NULL,
    priority DOUBLE NOT NULL, value DOUBLE NOT NULL, duration_s DOUBLE NOT NULL, max_duration_s DOUBLE,
    release_at TIMESTAMPTZ NOT NULL, deadline_at TIMESTAMPTZ, gpu_types VARCHAR[], tenant VARCHAR,
    max_attempts INTEGER NOT NULL, submitted_at TIMESTAMPTZ NOT NULL, source VARCHAR NOT NULL,
    sha256 VARCHAR NOT NULL, spec JSON NOT NULL, key VARCHAR NOT NULL
);
COMMENT ON TABLE specs IS 'Job specs taken in: one row a job, one for each recurring template, one for each occurrence';
COMMENT ON COLUMN specs.job IS 'The job''s id; an occurrence carries its instant after an @';
COMMENT ON COLUMN specs.template IS 'For an occurrence: the recurring job it belongs to';
COMMENT ON COLUMN specs.schedule IS 'For a recurring template: its cron fields. Templates are never run themselves';
COMMENT ON COLUMN specs.kind IS 'training, batch_inference or quantization';
COMMENT ON COLUMN specs.gpus IS 'GPUs it asks for';
COMMENT ON COLUMN specs.priority IS 'Worth of one of its GPU-hours';
COMMENT ON COLUMN specs.value IS 'Worth when it completes in time: priority x declared GPU-hours; never changes';
COMMENT ON COLUMN specs.duration_s IS 'Declared duration, seconds';
COMMENT ON COLUMN specs.max_duration_s IS 'Where the runner ends it, seconds after its start';
COMMENT ON COLUMN specs.release_at IS 'It may start from here on';
COMMENT ON COLUMN specs.deadline_at IS 'It earns nothing when it ends later';
COMMENT ON COLUMN specs.gpu_types IS 'GPU types it accepts; NULL for any';
COMMENT ON COLUMN specs.tenant IS 'Whose job it is';
COMMENT ON COLUMN specs.max_attempts IS 'Attempts that may fail before the job has failed';
COMMENT ON COLUMN specs.submitted_at IS 'When it was taken in';
COMMENT ON COLUMN specs.source IS 'Name of the file it came from';
COMMENT ON COLUMN specs.sha256 IS 'Hash of that file';
COMMENT ON COLUMN specs.spec IS 'The whole spec';
COMMENT ON COLUMN specs.key IS 'Key of the fact';

CREATE TABLE rejections (source VARCHAR NOT NULL, error VARCHAR NOT NULL, recorded_at TIMESTAMPTZ NOT NULL);
COMMENT ON TABLE rejections IS 'Specs that were refused; file and text lie in storage under rejected/';
COMMENT ON COLUMN rejections.source IS 'Name of the file';
COMMENT ON COLUMN rejections.error IS 'What its author was told';
COMMENT ON COLUMN rejections.recorded_at IS 'When';

CREATE TABLE cancels (job VARCHAR NOT NULL, recorded_at TIMESTAMPTZ NOT NULL);
COMMENT ON TABLE cancels IS 'Requests to end a job';
COMMENT ON COLUMN cancels.job IS 'The job, or the recurring template whose occurrences end';
COMMENT ON COLUMN cancels.recorded_at IS 'When the request was taken in';

CREATE TABLE demand_samples (
    service VARCHAR NOT NULL, ts TIMESTAMPTZ NOT NULL, value DOUBLE NOT NULL, gpus DOUBLE NOT NULL,
    origin VARCHAR NOT NULL, recorded_at TIMESTAMPTZ NOT NULL
);
COMMENT ON TABLE demand_samples IS 'Observed load, as it was read; a corrected sample is a later row (see view demand)';
COMMENT ON COLUMN demand_samples.service IS 'The real-time service';
COMMENT ON COLUMN demand_samples.ts IS 'Begin of the time the sample covers';
COMMENT ON COLUMN demand_samples.value IS 'The load in the source''s unit, such as requests/s';
COMMENT ON COLUMN demand_samples.gpus IS 'GPUs this load needs, with a fraction';
COMMENT ON COLUMN demand_samples.origin IS 'observed: seen as it came; recorded: history that was loaded';
COMMENT ON COLUMN demand_samples.recorded_at IS 'When it was taken in';

CREATE TABLE node_states (node VARCHAR NOT NULL, state VARCHAR NOT NULL, reason VARCHAR, recorded_at TIMESTAMPTZ NOT NULL);
COMMENT ON TABLE node_states IS 'Changes in the health of nodes';
COMMENT ON COLUMN node_states.node IS 'The node';
COMMENT ON COLUMN node_states.state IS 'ready: its worker answers; lost: it does not';
COMMENT ON COLUMN node_states.reason IS 'Why';
COMMENT ON COLUMN node_states.recorded_at IS 'When it was seen';

CREATE TABLE forecasts (
    instant TIMESTAMPTZ NOT NULL, service VARCHAR NOT NULL, step INTEGER NOT NULL, ts TIMESTAMPTZ NOT NULL,
    quantiles DOUBLE[] NOT NULL, method VARCHAR NOT NULL, reason VARCHAR NOT NULL
);
COMMENT ON TABLE forecasts IS 'What each plan expected of the demand';
COMMENT ON COLUMN forecasts.instant IS 'The plan''s instant';
COMMENT ON COLUMN forecasts.service IS 'The real-time service';
COMMENT ON COLUMN forecasts.step IS 'Slot of the horizon, 0 for the first';
COMMENT ON COLUMN forecasts.ts IS 'Begin of that slot';
COMMENT ON COLUMN forecasts.quantiles IS 'GPUs wanted, quantiles .05, .15, ... .95';
COMMENT ON COLUMN forecasts.method IS 'The forecaster that was used';
COMMENT ON COLUMN forecasts.reason IS 'Why that one';

CREATE TABLE plans (
    instant TIMESTAMPTZ NOT NULL, trigger VARCHAR NOT NULL, mode VARCHAR NOT NULL, slot_minutes INTEGER NOT NULL,
    slots INTEGER NOT NULL, objective DOUBLE NOT NULL, bound DOUBLE, value DOUBLE NOT NULL,
    utilization DOUBLE NOT NULL, shortage DOUBLE NOT NULL, solve_ms DOUBLE NOT NULL, placed INTEGER NOT NULL,
    unplaced INTEGER NOT NULL, fifo_value DOUBLE, fifo_utilization DOUBLE, fifo_objective DOUBLE,
    backfill_value DOUBLE, backfill_utilization DOUBLE, backfill_objective DOUBLE, greedy_value DOUBLE,
    greedy_utilization DOUBLE, greedy_objective DOUBLE, considered INTEGER NOT NULL,
    warnings VARCHAR[] NOT NULL
);
COMMENT ON TABLE plans IS 'Plans of the horizon, beside what three baselines would have got from the same inputs';
COMMENT ON COLUMN plans.instant IS 'When slot 0 begins';
COMMENT ON COLUMN plans.trigger IS 'hourly: the scheduled plan; replan: something changed in between';
COMMENT ON COLUMN plans.mode IS 'Solver whose plan stands: fast or full';
COMMENT ON COLUMN plans.slot_minutes IS 'Length of a slot';
COMMENT ON COLUMN plans.slots IS 'Slots in the horizon';
COMMENT ON COLUMN plans.objective IS 'Worth less shortage and move costs';
COMMENT ON COLUMN plans.bound IS 'Proven upper bound of the objective, if one was computed';
COMMENT ON COLUMN plans.value IS 'Value of the jobs in the plan, in proportion to their part inside the horizon';
COMMENT ON COLUMN plans.utilization IS '(job GPU-slots + served demand) / all GPU-slots of the horizon';
COMMENT ON COLUMN plans.shortage IS 'Expected missing real-time GPU-slots';
COMMENT ON COLUMN plans.solve_ms IS 'Milliseconds the solver took';
COMMENT ON COLUMN plans.placed IS 'Jobs in the plan';
COMMENT ON COLUMN plans.unplaced IS 'Jobs left out';
COMMENT ON COLUMN plans.fifo_value IS 'Value that first-in-first-out with peak reservation plans';
COMMENT ON COLUMN plans.fifo_utilization IS 'Utilization of that plan';
COMMENT ON COLUMN plans.fifo_objective IS 'Objective of that plan';
COMMENT ON COLUMN plans.backfill_value IS 'Value that priority order with backfill and peak reservation plans';
COMMENT ON COLUMN plans.backfill_utilization IS 'Utilization of that plan';
COMMENT ON COLUMN plans.backfill_objective IS 'Objective of that plan';
COMMENT ON COLUMN plans.greedy_value IS 'Value that backfill with our forecast plans';
COMMENT ON COLUMN plans.greedy_utilization IS 'Utilization of that plan';
COMMENT ON COLUMN plans.greedy_objective IS 'Objective of that plan';
COMMENT ON COLUMN plans.considered IS 'Facts about jobs, runs and nodes that it knew; more of them make a replan';
COMMENT ON COLUMN plans.warnings IS 'What the plan had to work around';

CREATE TABLE planned_jobs (
    instant TIMESTAMPTZ NOT NULL, job VARCHAR NOT NULL, start_at TIMESTAMPTZ, end_at TIMESTAMPTZ,
    gpus INTEGER[], reason VARCHAR, earliest_start_at TIMESTAMPTZ
);
COMMENT ON TABLE planned_jobs IS 'Each plan''s word on each job; only commitments bind (see allocations)';
COMMENT ON COLUMN planned_jobs.instant IS 'The plan''s instant';
COMMENT ON COLUMN planned_jobs.job IS 'The job';
COMMENT ON COLUMN planned_jobs.start_at IS 'Planned start; NULL when it is left out';
COMMENT ON COLUMN planned_jobs.end_at IS 'Planned end';
COMMENT ON COLUMN planned_jobs.gpus IS 'GPUs by their number in the plan''s grid';
COMMENT ON COLUMN planned_jobs.reason IS 'Why it is left out';
COMMENT ON COLUMN planned_jobs.earliest_start_at IS 'The earliest start it could get, if one was sought';

CREATE TABLE allocations (
    instant TIMESTAMPTZ NOT NULL, job VARCHAR NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL,
    ranks INTEGER NOT NULL, node VARCHAR NOT NULL, gpus INTEGER[] NOT NULL, start_at TIMESTAMPTZ NOT NULL,
    end_at TIMESTAMPTZ NOT NULL, key VARCHAR NOT NULL
);
COMMENT ON TABLE allocations IS 'What was committed: one row for each node of each attempt';
COMMENT ON COLUMN allocations.instant IS 'Instant of the commitment';
COMMENT ON COLUMN allocations.job IS 'The job';
COMMENT ON COLUMN allocations.attempt IS '1 for the first attempt';
COMMENT ON COLUMN allocations.rank IS 'The node''s rank within the gang, 0 for the first';
COMMENT ON COLUMN allocations.ranks IS 'Nodes in the gang';
COMMENT ON COLUMN allocations.node IS 'The node';
COMMENT ON COLUMN allocations.gpus IS 'GPU indices on that node';
COMMENT ON COLUMN allocations.start_at IS 'Committed start';
COMMENT ON COLUMN allocations.end_at IS 'Expected end';
COMMENT ON COLUMN allocations.key IS 'Key of the commitment';

CREATE TABLE serving (
    instant TIMESTAMPTZ NOT NULL, service VARCHAR NOT NULL, from_at TIMESTAMPTZ NOT NULL,
    node VARCHAR NOT NULL, gpus INTEGER[] NOT NULL
);
COMMENT ON TABLE serving IS 'GPUs committed to real-time services; each set holds until the next from_at';
COMMENT ON COLUMN serving.instant IS 'Instant of the commitment';
COMMENT ON COLUMN serving.service IS 'The service';
COMMENT ON COLUMN serving.from_at IS 'From when on';
COMMENT ON COLUMN serving.node IS 'The node; empty when the service has no GPUs from then on';
COMMENT ON COLUMN serving.gpus IS 'GPU indices on that node';

CREATE TABLE dispatches (
    job VARCHAR NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, node VARCHAR NOT NULL,
    flow_run VARCHAR NOT NULL, recorded_at TIMESTAMPTZ NOT NULL
);
COMMENT ON TABLE dispatches IS 'Flow runs created for the ranks of attempts';
COMMENT ON COLUMN dispatches.job IS 'The job';
COMMENT ON COLUMN dispatches.attempt IS 'The attempt';
COMMENT ON COLUMN dispatches.rank IS 'The rank';
COMMENT ON COLUMN dispatches.node IS 'Node whose work queue it went to';
COMMENT ON COLUMN dispatches.flow_run IS 'Id of the Prefect flow run';
COMMENT ON COLUMN dispatches.recorded_at IS 'When';

CREATE TABLE starts (
    job VARCHAR NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, node VARCHAR NOT NULL,
    void BOOLEAN NOT NULL, reason VARCHAR, pid INTEGER, recorded_at TIMESTAMPTZ NOT NULL
);
COMMENT ON TABLE starts IS 'Claims to begin, one winner for each rank of each attempt';
COMMENT ON COLUMN starts.job IS 'The job';
COMMENT ON COLUMN starts.attempt IS 'The attempt';
COMMENT ON COLUMN starts.rank IS 'The rank';
COMMENT ON COLUMN starts.node IS 'The node';
COMMENT ON COLUMN starts.void IS 'True: taken by the control side so that the rank can never begin';
COMMENT ON COLUMN starts.reason IS 'Why it was voided';
COMMENT ON COLUMN starts.pid IS 'Process id of the runner on the node';
COMMENT ON COLUMN starts.recorded_at IS 'When';

CREATE TABLE outcomes (
    job VARCHAR NOT NULL, attempt INTEGER NOT NULL, rank INTEGER NOT NULL, node VARCHAR NOT NULL,
    state VARCHAR NOT NULL, started_at TIMESTAMPTZ, ended_at TIMESTAMPTZ NOT NULL, gpu_seconds DOUBLE NOT NULL,
    cost DOUBLE NOT NULL, exit_code INTEGER, error VARCHAR, mfu DOUBLE, tokens_per_s DOUBLE, rows_per_s DOUBLE,
    loss DOUBLE, metrics JSON NOT NULL
);
COMMENT ON TABLE outcomes IS 'How each rank of each attempt ended';
COMMENT ON COLUMN outcomes.job IS 'The job';
COMMENT ON COLUMN outcomes.attempt IS 'The attempt';
COMMENT ON COLUMN outcomes.rank IS 'The rank';
COMMENT ON COLUMN outcomes.node IS 'The node';
COMMENT ON COLUMN outcomes.state IS
    'completed, failed, crashed, cancelled, timed_out, stopped (with its gang), lost (with its node) or not_started';
COMMENT ON COLUMN outcomes.started_at IS 'First instruction';
COMMENT ON COLUMN outcomes.ended_at IS 'Last';
COMMENT ON COLUMN outcomes.gpu_seconds IS 'GPUs x seconds held';
COMMENT ON COLUMN outcomes.cost IS 'gpu_seconds at the node''s price';
COMMENT ON COLUMN outcomes.exit_code IS 'Of the program; negative: the signal that ended it';
COMMENT ON COLUMN outcomes.error IS 'The line that says what went wrong';
COMMENT ON COLUMN outcomes.mfu IS 'Model FLOPs utilization, 0 to 1, of the peak named in metrics';
COMMENT ON COLUMN outcomes.tokens_per_s IS 'Tokens per second';
COMMENT ON COLUMN outcomes.rows_per_s IS 'Rows per second';
COMMENT ON COLUMN outcomes.loss IS 'Last training loss, nats per token';
COMMENT ON COLUMN outcomes.metrics IS 'Everything the program reported';

CREATE TABLE slots (
    instant TIMESTAMPTZ NOT NULL, until TIMESTAMPTZ NOT NULL, gpus INTEGER NOT NULL,
    planned_value DOUBLE, planned_utilization DOUBLE, busy_gpu_s DOUBLE NOT NULL, serving_gpu_s DOUBLE NOT NULL,
    utilization DOUBLE NOT NULL, demand_gpu_s DOUBLE NOT NULL, shortage_gpu_s DOUBLE NOT NULL,
    value DOUBLE NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL, fifo_value DOUBLE,
    fifo_utilization DOUBLE, backfill_value DOUBLE, backfill_utilization DOUBLE, recorded_at TIMESTAMPTZ NOT NULL
);
COMMENT ON TABLE slots IS 'The account of each planned slot once it has passed, as known then';
COMMENT ON COLUMN slots.instant IS 'Begin: the plan''s instant';
COMMENT ON COLUMN slots.until IS 'End: the next plan''s instant';
COMMENT ON COLUMN slots.gpus IS 'GPUs of the cluster';
COMMENT ON COLUMN slots.planned_value IS 'Value of the plan made at its begin, over the whole horizon';
COMMENT ON COLUMN slots.planned_utilization IS 'Utilization of that plan, over the whole horizon';
COMMENT ON COLUMN slots.busy_gpu_s IS 'GPU-seconds that jobs held';
COMMENT ON COLUMN slots.serving_gpu_s IS 'GPU-seconds of demand that services met';
COMMENT ON COLUMN slots.utilization IS '(busy + serving) / all GPU-seconds';
COMMENT ON COLUMN slots.demand_gpu_s IS 'GPU-seconds that services wanted';
COMMENT ON COLUMN slots.shortage_gpu_s IS 'The part of it they did not get';
COMMENT ON COLUMN slots.value IS 'Value of the jobs that completed in time';
COMMENT ON COLUMN slots.completed IS 'Jobs that completed';
COMMENT ON COLUMN slots.failed IS 'Attempts that ended otherwise';
COMMENT ON COLUMN slots.fifo_value IS 'Value of FIFO''s plan from the same inputs, over the whole horizon';
COMMENT ON COLUMN slots.fifo_utilization IS 'Its utilization';
COMMENT ON COLUMN slots.backfill_value IS 'Value of backfill''s plan from the same inputs, over the whole horizon';
COMMENT ON COLUMN slots.backfill_utilization IS 'Its utilization';
COMMENT ON COLUMN slots.recorded_at IS 'When the account was made';

CREATE TABLE missed_slots (instant TIMESTAMPTZ NOT NULL, reason VARCHAR NOT NULL, recorded_at TIMESTAMPTZ NOT NULL);
COMMENT ON TABLE missed_slots IS 'Slots that came too late to be planned';
COMMENT ON COLUMN missed_slots.instant IS 'The slot';
COMMENT ON COLUMN missed_slots.reason IS 'Why';
COMMENT ON COLUMN missed_slots.recorded_at IS 'When this was noticed';

CREATE TABLE degradations (
    instant TIMESTAMPTZ NOT NULL, step VARCHAR NOT NULL, subject VARCHAR NOT NULL, reason VARCHAR NOT NULL,
    recorded_at TIMESTAMPTZ NOT NULL
);
COMMENT ON TABLE degradations IS 'Steps that did less than they should have, so that the hour could go on';
COMMENT ON COLUMN degradations.instant IS 'The plan''s instant';
COMMENT ON COLUMN degradations.step IS 'collect, forecast, allocate, dispatch or record';
COMMENT ON COLUMN degradations.subject IS 'What it is about: a service, a job, a node';
COMMENT ON COLUMN degradations.reason IS 'What went wrong and what was done instead';
COMMENT ON COLUMN degradations.recorded_at IS 'When';
