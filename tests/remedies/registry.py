"""Where the remedy of each message is executed, why it need not be, and which are not executed yet.

The one idea: a message that proposes something has to be in one of three lists, so a new one brings its test or its
reason. `OPEN` may only become shorter.
"""

from __future__ import annotations

from tests.remedies.offers import OFFERS

_FOLLOWED = "tests/remedies/test_followed.py::test_remedies_give_one_process_s_weights"
_FIELDS = "tests/trainer/test_batch_fields.py::"
_OFFERED = "tests/remedies/test_offered.py::test_what_a_message_proposes_runs"
_REMEDIES = "tests/trainer/test_remedies.py::"
_UNCUT = "tests/trainer/test_uncut_batches.py::"

EXECUTED: dict[str, str] = {
    **dict.fromkeys(OFFERS, _OFFERED),
    "pipeline.batch.fields._unclear": _FIELDS + "test_sampled_negatives_of_all_rows_are_declared",
    "pipeline.batch_norm.microbatch_norm.DeferredBatchNorm.says": _FOLLOWED,
    "pipeline.stage.derivatives": "tests/bugs/test_pytorch_47562.py::test_as_in_one_process_where_it_is_said_to_run",
    "pipeline.gradients.gradient_sums.refuse_sparse": _FOLLOWED,
    "pipeline.parity.loss_check.LossCheck.differs": _FIELDS
    + "test_a_loss_over_all_rows_trains_uncut_and_a_mean_of_two_views_trains_cut",
    "pipeline.parity.stage_check.Fields.words": _FIELDS + "test_a_table_with_as_many_entries_as_rows",
    "pipeline.parity.stage_check.Fields.words#2": _FIELDS + "test_declared_fields_train_as_in_one_process",
    "pipeline.parity.stage_check.Fields.words#3": _FIELDS + "test_without_a_cut_packed_documents_train",
    "pipeline.parity.stage_check.StageCheck._differs": "tests/trainer/test_one_row.py::test_it_trains_uncut",
    "pipeline.parity.stage_check.StageCheck._go": _FIELDS
    + "test_what_cannot_be_compared_is_refused_until_that_is_said",
    "pipeline.parity.stage_check._warn_of_suspects": "tests/trainer/test_one_row.py::test_it_trains_uncut",
    "pipeline.batch_norm.whole_batch_norm": "tests/trainer/test_whole_batch_norm.py::"
    "test_a_tabular_network_with_norms_is_one_process",
    "strategies.zero.refuse_clipping_by_value": _FOLLOWED,
    "trainer.step.parameter_writes.refuse_written": _FOLLOWED,
    "trainer.failure.exception_hooks.warn_of_unsaved": "tests/trainer/test_saved_on_exception.py::"
    "test_several_workers_of_servers_are_told_at_the_start_what_saves_and_that_does",
    "trainer.refusals.refuse_scripts": _REMEDIES + "test_what_is_refused_names_zero_2_which_runs_it",
    "trainer.refusals.refuse_unsupported#2": _UNCUT + "test_several_optimizers_are_told_of_zero_which_runs_them",
    "trainer.refusals.refuse_unsupported#3": _FOLLOWED,
    "trainer.launch.script_launcher.refuse_no_script": "tests/unit/test_remedies.py::"
    "test_a_script_without_a_file_is_told_another_start_method",
    "parameter_server.trainer.server_plan.ServerPlan._update": "tests/trainer/conformance/test_refused.py::"
    "test_sandblaster_runs_the_optimizer_that_runs_its_closure_again",
    "trainer.step.trainer_step.TrainerStep._explain": _UNCUT
    + "test_a_batch_norm_that_sees_one_row_says_how_many_micro_batches_help",
    "strategies.server_states.ServerStates.load_model_state_dict": "tests/trainer/"
    "test_parameter_server_checkpoints.py::test_weights_that_servers_hold_are_not_restored_within_a_run",
    "parameter_server.trainer.server_plan.ServerPlan._update#3": "tests/trainer/test_parameter_server_checkpoints.py::"
    "test_an_unknown_optimizer_is_refused_and_workers_can_run_it",
    "zero.native.bucket.Bucket._fresh": _FOLLOWED,
    "zero.deepspeed.engine.DeepSpeedEngine.add_param_group": _FOLLOWED,
    "zero.deepspeed.engine.DeepSpeedEngine.begin_step": _FOLLOWED,
    "zero.deepspeed.engine.refuse_optimizers#2": _FOLLOWED,
    "zero.deepspeed.engine.refuse_parameters": _FOLLOWED,
    "zero.deepspeed.engine.refuse_parameters#2": _FOLLOWED,
    "zero.optimizer.elementwise": "tests/bugs/test_fairscale_767.py::test_the_remedy_is_one_process",
    "zero.fsdp2.engine.ShardedEngine._refuse_replaced": _FOLLOWED,
    "zero.fsdp2.engine._refuse_scalars": _FOLLOWED,
    "zero.deepspeed.hidden_gradient.HiddenGradient.__torch_dispatch__": _FOLLOWED,
    "zero.fsdp2.sharding._refuse_mixed": _FOLLOWED,
    "zero.fsdp2.sharding._refuse_mixed#2": _FOLLOWED,
    "pipeline.gradients.data_axis.DataAxis._sum": _FOLLOWED,
    "pipeline.partition.shape_inference.example_of": _FOLLOWED,
    "pipeline.phantoms.errors.unread": _FOLLOWED,
    "pipeline.stage.calls#3": _FOLLOWED,
    "pipeline.stage.calls.out_of_order": _FOLLOWED,
    "pipeline.stage.calls.without_gradients": _FOLLOWED,
    "pipeline.stage.calls.written_by": _FOLLOWED,
    "trainer.refusals.refuse_synchronised_norms": _FOLLOWED,
    "trainer.refusals.refuse_unsupported": _FOLLOWED,
    "trainer.step.carried_state._says": _FOLLOWED,
    "trainer.step.step_log.StepLog._note": _FOLLOWED,
    "zero.fsdp2.engine.ShardedEngine._shard": _FOLLOWED,
    "zero.fsdp2.engine._refuse_hooks": _FOLLOWED,
    "zero.reducer.Reducer._made": _FOLLOWED,
    "checkpoint.allowed.Untrusted.asks_for": "tests/security/test_checkpoints.py::"
    "test_a_charge_in_a_folder_is_refused_by_name_and_trusted_on_request",
    "parameter_server.table.refuse_sparse": "tests/trainer/test_parameter_server_sparse.py::"
    "test_workers_step_with_sparse_gradients",
    "parameter_server.trainer.worker.ServerWorker.refuse_written": "tests/bugs/test_deepspeed_3830.py::test_taken_over",
    "pipeline.batch_norm.whole_batch_norm.WholeBatchNorm._computed_again": "tests/trainer/test_whole_batch_norm.py::"
    "test_checkpoints_inside_of_blocks_are_one_process",
    "pipeline.batch_norm.whole_batch_norm.WholeBatchNorm._computed_again#2": "tests/trainer/test_whole_batch_norm.py::"
    "test_checkpoints_that_cannot_be_followed_are_refused",
    "pipeline.batch_norm.whole_batch_norm.WholeBatchNorm._refuse_mixed": "tests/trainer/test_whole_batch_norm.py::"
    "test_what_waits_in_attributes_at_a_norm_is_refused",
    "pipeline.parameters.replica_check.buffers_unchanged": "tests/trainer/test_two_ways.py::"
    "test_a_cache_in_a_buffer_is_let_be",
    "pipeline.runtime.joined_executor._OneOfSeveral.call": "tests/trainer/test_whole_batch_norm.py::"
    "test_checkpoints_that_cannot_be_followed_are_refused",
    "pipeline.stage.calls": "tests/trainer/test_skip_connections.py::test_parity",
    "pipeline.stage.calls#2": "tests/trainer/test_skip_connections.py::test_parity",
    "pipeline.stage.calls.not_sent": "tests/trainer/test_not_silent.py::"
    "test_what_a_stage_needs_is_answered_signature_by_signature",
    "pipeline.token_slices.attention#2": "tests/trainer/test_token_slices_with.py::"
    "test_blocks_that_are_computed_again_are_one_process",
    "pipeline.token_slices.microbatch.SlicedMicrobatch.backward": "tests/trainer/test_token_slices_with.py::"
    "test_blocks_that_are_computed_again_are_one_process",
    "pipeline.token_slices.repeats": "tests/trainer/test_token_slices_with.py::"
    "test_blocks_that_are_computed_again_are_one_process",
    "pipeline.token_slices.check": "tests/trainer/test_token_slices.py::test_causal_models_are_one_process",
    "strategies.meeting.MeetingStrategy.all_gather": "tests/trainer/test_gathered_gradients.py::"
    "test_others_have_the_gradient_of_ddp",
    "zero.closed_parameters._refuse#2": "tests/bugs/test_deepspeed_3830.py::"
    "test_what_is_written_to_whole_parameters_stays",
    "zero.deepspeed.engine.refuse_optimizers": "tests/trainer/test_uncut_batches.py::"
    "test_several_optimizers_are_told_of_zero_which_runs_them",
    "zero.deepspeed.veil": "tests/bugs/test_deepspeed_3830.py::test_taken_over_by_deepspeed",
    "zero.deepspeed.veil#3": "tests/bugs/test_accelerate_4159.py::"
    "test_methods_of_an_optimizer_run_on_what_a_rank_holds",
    "zero.fsdp2.engine.refuse_on_shards": "tests/trainer/test_remedies.py::"
    "test_what_is_refused_names_zero_2_which_runs_it",
    "zero.optimizer.state_shapes.refuse_states": "tests/bugs/test_accelerate_4159.py::"
    "test_they_run_where_parameters_are_whole",
}

EXPLAINED: dict[str, str] = {
    **dict.fromkeys(
        (
            "pipeline.graphs.BlockGraphs._capture",
            "pipeline.graphs.BlockGraphs._capture#2",
            "pipeline.graphs.Slot.refuse_other",
        ),
        "Needs a GPU; what it names is the default, which every test of pipelines runs.",
    ),
    "degrees.Degrees.axes": "The number of processes is the user's; it is named with the numbers that fit.",
    "failure.heartbeats": "Says what all ranks have to do together; nothing else would run.",
    "pipeline.schedules.spec.parse": "The form of an argument; the tests of schedules write it so.",
    "pipeline.partition.layout._too_few": "The form of an argument, filled in by the user's names.",
    "pipeline.partition.layout._override": "The form of an argument, filled in by the user's numbers.",
    "trainer.metrics.logged_metrics.OfOneMicrobatch.__repr__": "What a value is called, no advice.",
}

OPEN: frozenset[str] = frozenset(
    {
        "parallel.attention.Heads.forward",
        "parallel.attention.refuse_attention",
        "parallel.attention_extras.joint_norms",
        "parallel.logits.VocabLogits.__torch_dispatch__",
        "parallel.plan._check",
        "parallel.plan.resolve",
        "parallel.sequence.ChainEnds._slice",
        "parallel.sequence.ChainEnds.run_check",
        "parallel.sequence._chain",
        "parallel.sequence.add_sequence_styles",
        "parallel.sequence.refuse_outside",
        "pipeline.batch.rows.count_rows",
        "pipeline.stage.boundary.SendBoundary._check",
        "pipeline.stage.calls.not_all_called",
        "pipeline.stage.calls.which_call",
        "pipeline.transport.model_replica",
        "pipeline.transport.model_replica#2",
        "pipeline.stage.side_effects.call_hooks_inside",
        "pipeline.parity.loss_check.LossCheck._returned_differs",
        "pipeline.parity.loss_check.LossCheck.warn",
        "pipeline.parameters.table.ParameterTable.rows_of_module",
        "pipeline.schedules.bidirectional.chimera",
        "pipeline.parity.stage_check.StageCheck._finding",
        "pipeline.token_slices.attention",
        "pipeline.token_slices.attention.MultiHead._refuse",
        "pipeline.batch_norm.whole_batch_norm.WholeBatchNorm.together",
        "parameter_server.from_torch.Rates._compare",
        "parameter_server.from_torch.Rates._compare#2",
        "parameter_server.hosting.Hosting.lost",
        "parameter_server.transport.zeromq.Node.__init__",
        "strategies.checkpoints.FileOrFolder.save_checkpoint",
        "strategies.hybrid.HybridStrategy._refuse_overlap",
        "strategies.pipeline_steps.PipelineSteps._forward_context",
        "strategies.server_life.ServerLife.setup_environment",
        "strategies.server_steps.ServerSteps._meet",
        "strategies.server_steps.ServerSteps.on_train_start",
        "strategies.zero.refuse_settings",
        "strategies.zero.refuse_settings#2",
        "strategies.zero.refuse_settings#3",
        "strategies.zero.refuse_settings#4",
        "strategies.zero_division.ZeRODivision._shard",
        "parameter_server.trainer.sandblaster.batch_worker.refuse_steps",
        "parameter_server.trainer.sandblaster.batch_worker.refuse_steps#3",
        "parameter_server.trainer.sandblaster.batch_worker.rows_of",
        "trainer.state.checkpoint_io.leave_weights",
        "trainer.state.weight_callbacks.refuse_sharded",
        "trainer.step.log_spreader.LogSpreader.__init__",
        "trainer.metrics.logged_metrics.LoggedMetrics.given",
        "parameter_server.trainer.coordination.past_runs.passed_over.run",
        "trainer.launch.process_launcher.ProcessLauncher._check",
        "trainer.refusals.refuse_unsupported#4",
        "zero.closed_parameters._refuse",
        "zero.deepspeed.engine.DeepSpeedEngine.after_evaluation_step",
        "zero.deepspeed.engine.refuse_optimizers#3",
        "zero.deepspeed.veil#2",
        "zero.gather.late_reads.LateReads.meet",
        "zero.same_calls.SameCalls._words",
        "zero.native.stage_states.StageStates.begin",
        "zero.fsdp2.whole_scalars._handlers",
        "zero.gather.parameter_gather.ParameterGather._enter",
    }
)
