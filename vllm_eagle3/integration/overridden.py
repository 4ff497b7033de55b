"""Every vLLM function that we override, wrap or rely on, as `module:qualname`.

Patches name theirs in `patches.PATCHES`; everything else stands here.
"""

CONFIG = (
    "vllm.platforms.cpu:CpuPlatform.check_and_update_config",
    "vllm.config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
    "vllm.config.vllm:VllmConfig.use_v2_model_runner",
    "vllm.sampling_params:SamplingParams.verify",
    "vllm.config.speculative:SpeculativeConfig.__post_init__",
    "vllm.config.speculative:SpeculativeConfig.compose_draft_hf_overrides",
    "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
)

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
RUNNER = (
    f"{_RUNNER}.__init__",
    f"{_RUNNER}.execute_model",
    f"{_RUNNER}._update_states",
    f"{_RUNNER}._sample",
    f"{_RUNNER}.sample_tokens",
    f"{_RUNNER}.propose_draft_token_ids",
    f"{_RUNNER}.take_draft_token_ids",
    f"{_RUNNER}.initialize_kv_cache",
    f"{_RUNNER}.initialize_kv_cache_tensors",
    f"{_RUNNER}._prepare_inputs",
    f"{_RUNNER}._build_attention_metadata",
    f"{_RUNNER}._copy_draft_token_ids_to_cpu",
    f"{_RUNNER}._input_fits_in_drafter",
    f"{_RUNNER}.reload_weights",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner.__init__",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model",
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device",
    "vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory",
    "vllm.v1.worker.gpu_worker:Worker._make_model_runner",
    "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
    "vllm.v1.worker.utils:allocate_kv_cache",
    "vllm.v1.worker.utils:copy_kv_cache_blocks_inplace",
    "vllm.v1.sample.sampler:Sampler.sample",
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
)

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_KV_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
SCHEDULER = (
    f"{_SCHEDULER}.__init__",
    f"{_SCHEDULER}.schedule",
    f"{_SCHEDULER}.update_draft_token_ids",
    f"{_SCHEDULER}.update_from_output",
    f"{_SCHEDULER}.add_request",
    f"{_SCHEDULER}.make_stats",
    f"{_SCHEDULER}._free_request",
    f"{_SCHEDULER}._get_local_prefix_cache_hit",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.prefix_cache_lookup_enabled",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.create_kv_cache_blocks",
    "vllm.v1.core.block_pool:BlockPool.get_cached_block",
    f"{_KV_MANAGER}.get_num_blocks_to_allocate",
    f"{_KV_MANAGER}.add_local_computed_blocks",
    f"{_KV_MANAGER}.allocate_new_blocks",
)

METRICS = (
    "vllm.v1.metrics.loggers:PrometheusStatLogger.__init__",
    "vllm.v1.metrics.loggers:PrometheusStatLogger.record",
    "vllm.v1.spec_decode.metrics:SpecDecodingProm.__init__",
    "vllm.v1.spec_decode.metrics:SpecDecodingProm.observe",
    "vllm.v1.spec_decode.metrics:SpecDecodingLogging.observe",
    "vllm.v1.metrics.utils:create_metric_per_engine",
)

_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
PROPOSER = (
    f"{_PROPOSER}.__init__",
    f"{_PROPOSER}.load_model",
    f"{_PROPOSER}._get_model",
    f"{_PROPOSER}.propose",
    f"{_PROPOSER}.set_inputs_first_pass",
    f"{_PROPOSER}.build_model_inputs_first_pass",
    f"{_PROPOSER}.build_per_group_and_layer_attn_metadata",
    f"{_PROPOSER}._determine_batch_execution_and_padding",
    f"{_PROPOSER}._get_slot_mapping",
    f"{_PROPOSER}._set_positions",
    f"{_PROPOSER}._sample_draft_tokens",
    f"{_PROPOSER}.prepare_next_token_ids_padded",
    f"{_PROPOSER}.dummy_run",
    "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM.forward",
    "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM.compute_logits",
    "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM.load_weights",
)

FUNCTIONS = (*CONFIG, *RUNNER, *SCHEDULER, *METRICS, *PROPOSER)
