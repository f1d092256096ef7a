-- What each policy planned for the committed slots alone, to stand beside what happened in them.

ALTER TABLE plans ADD COLUMN slot_value DOUBLE;
ALTER TABLE plans ADD COLUMN slot_utilization DOUBLE;
ALTER TABLE plans ADD COLUMN fifo_slot_value DOUBLE;
ALTER TABLE plans ADD COLUMN fifo_slot_utilization DOUBLE;
ALTER TABLE plans ADD COLUMN backfill_slot_value DOUBLE;
ALTER TABLE plans ADD COLUMN backfill_slot_utilization DOUBLE;
ALTER TABLE plans ADD COLUMN greedy_slot_value DOUBLE;
ALTER TABLE plans ADD COLUMN greedy_slot_utilization DOUBLE;
COMMENT ON COLUMN plans.slot_value IS
    'Worth of the work before the next plan: each job''s value in proportion to its time there';
COMMENT ON COLUMN plans.slot_utilization IS '(job GPU-slots + served demand) / all GPU-slots before the next plan';
COMMENT ON COLUMN plans.fifo_slot_value IS 'slot_value of FIFO''s plan from the same inputs';
COMMENT ON COLUMN plans.fifo_slot_utilization IS 'slot_utilization of FIFO''s plan';
COMMENT ON COLUMN plans.backfill_slot_value IS 'slot_value of backfill''s plan from the same inputs';
COMMENT ON COLUMN plans.backfill_slot_utilization IS 'slot_utilization of backfill''s plan';
COMMENT ON COLUMN plans.greedy_slot_value IS 'slot_value of greedy''s plan from the same inputs';
COMMENT ON COLUMN plans.greedy_slot_utilization IS 'slot_utilization of greedy''s plan';

ALTER TABLE slots ADD COLUMN worked_value DOUBLE;
ALTER TABLE slots ADD COLUMN greedy_value DOUBLE;
ALTER TABLE slots ADD COLUMN greedy_utilization DOUBLE;
ALTER TABLE slots ADD COLUMN planned_slot_value DOUBLE;
ALTER TABLE slots ADD COLUMN planned_slot_utilization DOUBLE;
ALTER TABLE slots ADD COLUMN fifo_slot_value DOUBLE;
ALTER TABLE slots ADD COLUMN fifo_slot_utilization DOUBLE;
ALTER TABLE slots ADD COLUMN backfill_slot_value DOUBLE;
ALTER TABLE slots ADD COLUMN backfill_slot_utilization DOUBLE;
ALTER TABLE slots ADD COLUMN greedy_slot_value DOUBLE;
ALTER TABLE slots ADD COLUMN greedy_slot_utilization DOUBLE;
COMMENT ON COLUMN slots.worked_value IS
    'Worth of the work done: each job''s value in proportion to its time in the slot, failed attempts left out';
COMMENT ON COLUMN slots.greedy_value IS 'Value of greedy''s plan from the same inputs, over the whole horizon';
COMMENT ON COLUMN slots.greedy_utilization IS 'Its utilization';
COMMENT ON COLUMN slots.planned_slot_value IS 'Worth of the work that the plan had in this slot';
COMMENT ON COLUMN slots.planned_slot_utilization IS 'Utilization that the plan had in this slot';
COMMENT ON COLUMN slots.fifo_slot_value IS 'Worth of the work that FIFO''s plan had in this slot';
COMMENT ON COLUMN slots.fifo_slot_utilization IS 'Utilization of FIFO''s plan in this slot';
COMMENT ON COLUMN slots.backfill_slot_value IS 'Worth of the work that backfill''s plan had in this slot';
COMMENT ON COLUMN slots.backfill_slot_utilization IS 'Utilization of backfill''s plan in this slot';
COMMENT ON COLUMN slots.greedy_slot_value IS 'Worth of the work that greedy''s plan had in this slot';
COMMENT ON COLUMN slots.greedy_slot_utilization IS 'Utilization of greedy''s plan in this slot';

CREATE OR REPLACE VIEW hours AS
SELECT p.instant, p.mode, p.value AS planned_value, p.utilization AS planned_utilization, p.fifo_value,
    p.backfill_value, p.greedy_value, p.placed, p.unplaced, p.solve_ms, s.utilization, s.value, s.completed,
    s.failed, s.shortage_gpu_s, p.slot_value AS planned_slot_value, p.fifo_slot_value, p.backfill_slot_value,
    p.greedy_slot_value, s.worked_value, p.slot_utilization AS planned_slot_utilization,
    p.fifo_slot_utilization, p.backfill_slot_utilization, p.greedy_slot_utilization
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
COMMENT ON COLUMN hours.planned_slot_value IS 'Worth of the work planned before the next plan';
COMMENT ON COLUMN hours.fifo_slot_value IS 'The same of FIFO''s plan';
COMMENT ON COLUMN hours.backfill_slot_value IS 'The same of backfill''s plan';
COMMENT ON COLUMN hours.greedy_slot_value IS 'The same of greedy''s plan';
COMMENT ON COLUMN hours.worked_value IS 'Worth of the work that was done';
COMMENT ON COLUMN hours.planned_slot_utilization IS 'Utilization planned before the next plan';
COMMENT ON COLUMN hours.fifo_slot_utilization IS 'The same of FIFO''s plan';
COMMENT ON COLUMN hours.backfill_slot_utilization IS 'The same of backfill''s plan';
COMMENT ON COLUMN hours.greedy_slot_utilization IS 'The same of greedy''s plan';
