BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE alerts (
	id INTEGER NOT NULL, 
	experiment_id BIGINT NOT NULL, 
	trial_id BIGINT, 
	time DOUBLE NOT NULL, 
	level TEXT NOT NULL, 
	title TEXT NOT NULL, 
	description TEXT NOT NULL, 
	CONSTRAINT pk_alerts PRIMARY KEY (id), 
	CONSTRAINT fk_alerts_experiment_id FOREIGN KEY(experiment_id) REFERENCES experiments (id)
);
INSERT INTO "alerts" VALUES(1,1,1,401.0,'INFO','done','well');
INSERT INTO "alerts" VALUES(2,1,NULL,402.0,'ERROR','lost','');
CREATE TABLE allocations (
	id TEXT NOT NULL, 
	trial_id BIGINT NOT NULL, 
	run_id BIGINT NOT NULL, 
	state TEXT NOT NULL, 
	slots BIGINT NOT NULL, 
	slot_ids TEXT NOT NULL, 
	steps_completed BIGINT NOT NULL, 
	latest_checkpoint TEXT, 
	ready BOOLEAN NOT NULL, 
	preempt_time DOUBLE, 
	preempt_reason TEXT, 
	acked BOOLEAN NOT NULL, 
	kill_time DOUBLE, 
	kill_reason TEXT, 
	exit_kind TEXT, 
	exit_status BIGINT, 
	exit_signal BIGINT, 
	exit_detail TEXT, 
	facts TEXT NOT NULL, 
	create_time DOUBLE NOT NULL, 
	start_time DOUBLE, 
	end_time DOUBLE, 
	CONSTRAINT pk_allocations PRIMARY KEY (id), 
	CONSTRAINT fk_allocations_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id), 
	CONSTRAINT uq_allocations_trial_id_run_id UNIQUE (trial_id, run_id)
);
INSERT INTO "allocations" VALUES('1.r1.1',1,1,'ENDED',0,'[]',0,NULL,0,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,'{}',1.0,NULL,NULL);
CREATE TABLE checkpoints (
	uuid TEXT NOT NULL, 
	experiment_id BIGINT NOT NULL, 
	trial_id BIGINT NOT NULL, 
	task_id TEXT NOT NULL, 
	allocation_id TEXT, 
	storage_id BIGINT, 
	state TEXT NOT NULL, 
	metadata TEXT NOT NULL, 
	resources TEXT NOT NULL, 
	size BIGINT NOT NULL, 
	steps_completed BIGINT NOT NULL, 
	report_time DOUBLE NOT NULL, 
	reported TEXT NOT NULL, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (uuid), 
	CONSTRAINT fk_checkpoints_experiment_id FOREIGN KEY(experiment_id) REFERENCES experiments (id), 
	CONSTRAINT fk_checkpoints_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id)
);
INSERT INTO "checkpoints" VALUES('c1',1,1,'1.r1',NULL,NULL,'COMPLETED','{}','{"f":1}',1,4,150.0,'295e4dfdd20f57265635389833c500f5ff07a1ad332d10faf67af1f9a864ac60');
CREATE TABLE contexts (
	digest TEXT NOT NULL, 
	content BLOB NOT NULL, 
	size BIGINT NOT NULL, 
	create_time DOUBLE NOT NULL, 
	CONSTRAINT pk_contexts PRIMARY KEY (digest)
);
CREATE TABLE experiments (
	id INTEGER NOT NULL, 
	state TEXT NOT NULL, 
	name TEXT NOT NULL, 
	description TEXT NOT NULL, 
	labels TEXT NOT NULL, 
	config TEXT NOT NULL, 
	original_config TEXT NOT NULL, 
	warnings TEXT NOT NULL, 
	context TEXT, 
	seed BIGINT NOT NULL, 
	priority BIGINT NOT NULL, 
	progress DOUBLE NOT NULL, 
	archived BOOLEAN NOT NULL, 
	unmanaged BOOLEAN NOT NULL, 
	parent_id BIGINT, 
	external_id TEXT, 
	error TEXT, 
	start_time DOUBLE NOT NULL, 
	end_time DOUBLE, 
	CONSTRAINT pk_experiments PRIMARY KEY (id), 
	CONSTRAINT uq_experiments_external_id UNIQUE (external_id)
);
INSERT INTO "experiments" VALUES(1,'COMPLETED','old','','[]','{"searcher":{"name":"random","metric":"loss","smaller_is_better":true}}','','[]',NULL,0,42,0.0,0,0,NULL,NULL,NULL,1.0,NULL);
CREATE TABLE key_values (
	"key" TEXT NOT NULL, 
	value TEXT, 
	CONSTRAINT pk_key_values PRIMARY KEY ("key")
);
INSERT INTO "key_values" VALUES('cluster','"mine"');
CREATE TABLE lineage (
	trial_id BIGINT NOT NULL, 
	checkpoint_uuid TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	model_id TEXT, 
	model_version BIGINT, 
	time DOUBLE NOT NULL, 
	CONSTRAINT pk_lineage PRIMARY KEY (trial_id, checkpoint_uuid, kind)
);
INSERT INTO "lineage" VALUES(2,'c1','INFERENCE',NULL,NULL,1.0);
CREATE TABLE log_offsets (
	allocation_id TEXT NOT NULL, 
	stream TEXT NOT NULL, 
	"offset" BIGINT NOT NULL, 
	CONSTRAINT pk_log_offsets PRIMARY KEY (allocation_id, stream)
);
CREATE TABLE logs (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	task_id TEXT NOT NULL, 
	allocation_id TEXT, 
	agent_id TEXT, 
	container_id TEXT, 
	rank BIGINT, 
	timestamp DOUBLE NOT NULL, 
	level TEXT NOT NULL, 
	stdtype TEXT NOT NULL, 
	source TEXT NOT NULL, 
	log TEXT NOT NULL
);
INSERT INTO "logs" VALUES(1,'1.r1',NULL,NULL,NULL,NULL,1.0,'INFO','stdout','task','first
');
CREATE TABLE metrics (
	trial_id BIGINT NOT NULL, 
	grp TEXT NOT NULL, 
	step BIGINT NOT NULL, 
	run_id BIGINT NOT NULL, 
	restart BIGINT NOT NULL, 
	rank BIGINT NOT NULL, 
	seq BIGINT NOT NULL, 
	time DOUBLE NOT NULL, 
	metrics TEXT NOT NULL, 
	batch_metrics TEXT, 
	CONSTRAINT pk_metrics PRIMARY KEY (trial_id, grp, step, run_id, restart, rank, seq)
)
 WITHOUT ROWID

;
INSERT INTO "metrics" VALUES(1,'training',1,1,0,0,1,101.0,'{"loss":8.0}',NULL);
INSERT INTO "metrics" VALUES(1,'training',2,1,0,0,2,102.0,'{"loss":7.0}',NULL);
INSERT INTO "metrics" VALUES(1,'training',3,1,0,0,3,103.0,'{"loss":6.0}',NULL);
INSERT INTO "metrics" VALUES(1,'training',4,1,0,0,4,104.0,'{"loss":5.0}',NULL);
INSERT INTO "metrics" VALUES(1,'training',5,2,0,0,1,101.0,'{"loss":3.5}',NULL);
INSERT INTO "metrics" VALUES(1,'validation',4,1,0,0,9,109.0,'{"loss":0.25,"accuracy":1}',NULL);
INSERT INTO "metrics" VALUES(1,'validation',5,1,0,0,10,110.0,'{"loss":0.125}',NULL);
INSERT INTO "metrics" VALUES(1,'validation',6,2,0,0,2,102.0,'{"loss":0.5}',NULL);
INSERT INTO "metrics" VALUES(2,'validation',1,1,0,-1,0,301.0,'{"loss":NaN}',NULL);
INSERT INTO "metrics" VALUES(2,'validation',2,1,0,-1,1,302.0,'{"loss":0.375}',NULL);
CREATE TABLE operations (
	trial_id BIGINT NOT NULL, 
	ordinal BIGINT NOT NULL, 
	length BIGINT NOT NULL, 
	completed BOOLEAN NOT NULL, 
	metric TEXT, 
	create_time DOUBLE NOT NULL, 
	end_time DOUBLE, 
	CONSTRAINT pk_operations PRIMARY KEY (trial_id, ordinal), 
	CONSTRAINT fk_operations_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id)
);
CREATE TABLE records (
	trial_id BIGINT NOT NULL, 
	run_id BIGINT NOT NULL, 
	restart BIGINT NOT NULL, 
	rank BIGINT NOT NULL, 
	seq BIGINT NOT NULL, 
	kind TEXT NOT NULL, 
	time DOUBLE NOT NULL, 
	body TEXT NOT NULL, 
	CONSTRAINT pk_records PRIMARY KEY (trial_id, run_id, restart, rank, seq)
)
 WITHOUT ROWID

;
INSERT INTO "records" VALUES(1,2,0,0,0,'restore',200.0,'{"storage_id":"c","steps_completed":4}');
CREATE TABLE run_metadata (
	trial_id BIGINT NOT NULL, 
	metadata TEXT NOT NULL, 
	time DOUBLE NOT NULL, 
	CONSTRAINT pk_run_metadata PRIMARY KEY (trial_id), 
	CONSTRAINT fk_run_metadata_trial_id FOREIGN KEY(trial_id) REFERENCES trials (id)
);
CREATE TABLE searcher_events (
	experiment_id BIGINT NOT NULL, 
	ordinal BIGINT NOT NULL, 
	event TEXT NOT NULL, 
	actions TEXT, 
	time DOUBLE NOT NULL, 
	CONSTRAINT pk_searcher_events PRIMARY KEY (experiment_id, ordinal), 
	CONSTRAINT fk_searcher_events_experiment_id FOREIGN KEY(experiment_id) REFERENCES experiments (id)
);
CREATE TABLE searcher_snapshots (
	experiment_id BIGINT NOT NULL, 
	ordinal BIGINT NOT NULL, 
	snapshot TEXT NOT NULL, 
	time DOUBLE NOT NULL, 
	CONSTRAINT pk_searcher_snapshots PRIMARY KEY (experiment_id), 
	CONSTRAINT fk_searcher_snapshots_experiment_id FOREIGN KEY(experiment_id) REFERENCES experiments (id)
);
CREATE TABLE storages (
	id INTEGER NOT NULL, 
	digest TEXT NOT NULL, 
	config TEXT NOT NULL, 
	CONSTRAINT pk_storages PRIMARY KEY (id), 
	CONSTRAINT uq_storages_digest UNIQUE (digest)
);
CREATE TABLE tokens (
	digest TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	allocation_id TEXT, 
	trial_id BIGINT, 
	experiment_id BIGINT, 
	create_time DOUBLE NOT NULL, 
	CONSTRAINT pk_tokens PRIMARY KEY (digest)
);
CREATE TABLE trials (
	id INTEGER NOT NULL, 
	experiment_id BIGINT NOT NULL, 
	request_id TEXT NOT NULL, 
	task_id TEXT NOT NULL, 
	external_id TEXT, 
	state TEXT NOT NULL, 
	hparams TEXT NOT NULL, 
	seed BIGINT NOT NULL, 
	run_id BIGINT NOT NULL, 
	restarts BIGINT NOT NULL, 
	closed BOOLEAN NOT NULL, 
	reopened BOOLEAN NOT NULL, 
	validated BIGINT NOT NULL, 
	early_exit TEXT, 
	status TEXT NOT NULL, 
	progress DOUBLE NOT NULL, 
	warm_start TEXT, 
	unmanaged BOOLEAN NOT NULL, 
	error TEXT, 
	last_activity DOUBLE, 
	start_time DOUBLE NOT NULL, 
	end_time DOUBLE, 
	CONSTRAINT pk_trials PRIMARY KEY (id), 
	CONSTRAINT fk_trials_experiment_id FOREIGN KEY(experiment_id) REFERENCES experiments (id), 
	CONSTRAINT uq_trials_experiment_id_external_id UNIQUE (experiment_id, external_id), 
	CONSTRAINT uq_trials_experiment_id_request_id UNIQUE (experiment_id, request_id), 
	CONSTRAINT uq_trials_task_id UNIQUE (task_id)
);
INSERT INTO "trials" VALUES(1,1,'r1','1.r1',NULL,'COMPLETED','{"lr":0.1}',0,1,0,0,0,-1,NULL,'',0.0,NULL,0,NULL,NULL,1.0,NULL);
INSERT INTO "trials" VALUES(2,1,'r2','1.r2',NULL,'COMPLETED','{"lr":0.2}',0,0,0,0,0,-1,NULL,'',0.0,NULL,0,NULL,NULL,1.0,NULL);
INSERT INTO "trials" VALUES(3,1,'r3','1.r3',NULL,'COMPLETED','{"lr":0.3}',0,0,0,0,0,-1,NULL,'',0.0,NULL,0,NULL,NULL,1.0,NULL);
CREATE TABLE writers (
	trial_id BIGINT NOT NULL, 
	run_id BIGINT NOT NULL, 
	restart BIGINT NOT NULL, 
	rank BIGINT NOT NULL, 
	next_seq BIGINT NOT NULL, 
	restored BIGINT, 
	groups TEXT NOT NULL, 
	CONSTRAINT pk_writers PRIMARY KEY (trial_id, run_id, restart, rank)
)
 WITHOUT ROWID

;
INSERT INTO "writers" VALUES(1,1,0,0,11,NULL,'{"training":[4,0,1,1,1,4,true,{"loss":[4,4,26.0,5.0,8.0,5.0]}],"validation":[2,0,9,4,4,5,true,{"loss":[2,2,0.375,0.125,0.25,0.125],"accuracy":[1,1,1.0,1,1,1]}]}');
INSERT INTO "writers" VALUES(1,2,0,0,3,4,'{"training":[1,0,1,5,5,5,true,{"loss":[1,1,3.5,3.5,3.5,3.5]}],"validation":[1,0,2,6,6,6,true,{"loss":[1,1,0.5,0.5,0.5,0.5]}]}');
INSERT INTO "writers" VALUES(2,1,0,-1,2,NULL,'{"validation":[2,0,0,1,1,2,true,{"loss":[2,1,0.375,0.375,0.375,0.375]}]}');
CREATE INDEX ix_logs_task_id_id ON logs (task_id, id);
CREATE INDEX ix_tokens_allocation_id ON tokens (allocation_id);
CREATE INDEX ix_alerts_experiment_id ON alerts (experiment_id);
CREATE INDEX ix_allocations_state ON allocations (state);
CREATE INDEX ix_checkpoints_experiment_id ON checkpoints (experiment_id);
CREATE INDEX ix_checkpoints_trial_id ON checkpoints (trial_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('logs',1);
COMMIT;
