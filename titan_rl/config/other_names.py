"""Names that other systems use for a key or section, for the hint beside an unknown one.

A value of ``KEYS`` begins with the key's name here. ``NOT_HERE`` has what there is no key for, and why.
"""

_STEPS = "training.steps: a run counts steps, and goes through data as often as they take"
_PACKED = (
    "a step has rollout.prompts_per_step prompts of rollout.group_size answers each (of data: data.examples_per_step "
    "examples), packed into rows of training.seq_len tokens that the ranks share"
)
_DRAWN = "answers are sampled in training, and evaluation is greedy"
_ENGINE = "vLLM's own default, or what the run's lengths need"
_ROUTING = 'algorithm.routing, which is "replay" or "own"'
_CAP = "algorithm.importance_high"
_NO_CODE = "no code of a model's directory is run; model.family names one of your own"
KEYS = {
    # lengths of a run, and sizes of a batch
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), _STEPS),
    **dict.fromkeys(("max_steps", "train_steps", "num_steps", "total_steps", "total_training_steps"), "training.steps"),
    "batch_size": "rollout.prompts_per_step, or data.examples_per_step",
    "train_batch_size": "rollout.prompts_per_step, or data.examples_per_step",
    "ppo_mini_batch_size": "algorithm.updates_per_batch, which counts a batch's optimizer steps",
    **dict.fromkeys(("num_generations", "rollouts_per_example", "rollout_n", "n"), "rollout.group_size"),
    "steps": "training.steps",
    "seq_len": "training.seq_len",
    **dict.fromkeys(("max_length", "max_prompt_length", "max_model_len", "max_seq_len"), "training.seq_len"),
    **dict.fromkeys(
        ("max_tokens", "max_response_length", "max_completion_length", "response_length"), "rollout.max_new_tokens"
    ),
    "max_assistant_turns": "rollout.max_turns",
    **dict.fromkeys(("async_level", "max_async_level", "max_off_policy_steps"), "rollout.max_staleness"),
    # optimizer and schedule
    **dict.fromkeys(("learning_rate", "lr"), "optimizer.lr"),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "optimizer.betas"),
    "adam_epsilon": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad"), "training.max_norm"),
    **dict.fromkeys(("warmup", "warmup_ratio", "lr_warmup_steps", "num_warmup_steps"), "lr_scheduler.warmup_steps"),
    **dict.fromkeys(("lr_scheduler_type", "lr_decay_style"), "lr_scheduler.decay_type"),
    "min_lr": "lr_scheduler.min_lr_factor",
    # algorithms
    "adv_estimator": "algorithm.name",
    **dict.fromkeys(("loss_agg_mode", "loss_type"), "algorithm.aggregation"),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "kl_beta", "beta"), "algorithm.kl_coefficient"),
    **dict.fromkeys(("use_kl_loss", "use_kl_in_reward"), "algorithm.kl_in, beside algorithm.kl_coefficient"),
    "kl_loss_type": "algorithm.kl_estimator",
    **dict.fromkeys(("clip_ratio", "epsilon", "cliprange"), "algorithm.clip_low and algorithm.clip_high"),
    **dict.fromkeys(("clip_ratio_low", "epsilon_low"), "algorithm.clip_low"),
    **dict.fromkeys(("clip_ratio_high", "epsilon_high"), "algorithm.clip_high"),
    "clip_ratio_c": "algorithm.dual_clip",
    **dict.fromkeys(("entropy_coef", "entropy_coeff"), "algorithm.entropy_coefficient"),
    **dict.fromkeys(("norm_adv_by_std_in_grpo", "scale_rewards"), "algorithm.normalize_std"),
    "mask_truncated_completions": "algorithm.train_truncated",
    **dict.fromkeys(("router_replay", "enable_router_replay", "enable_return_routed_experts"), _ROUTING),
    **dict.fromkeys(("enable_rollout_routing_replay", "use_rollout_routing_replay"), _ROUTING),
    "gamma": "algorithm.discount",
    "lam": "algorithm.gae_lambda",
    "cliprange_value": "critic.value_clip",
    "critic_warmup": "critic.warmup_steps",
    **dict.fromkeys(("filter_groups", "dynamic_sampling"), "filter.no_signal"),
    # models and adapters
    **dict.fromkeys(("model_name", "model_name_or_path", "hf_assets_path", "pretrained"), "model.path"),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "lora.rank"),
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.targets",
    **dict.fromkeys(("bf16", "param_dtype", "torch_dtype"), "training.mixed_precision_param"),
    "gradient_checkpointing": "activation_checkpoint.mode",
    **dict.fromkeys(("max_pixels", "image_max_pixels"), "model.images.max_pixels"),
    **dict.fromkeys(("min_pixels", "image_min_pixels"), "model.images.min_pixels"),
    "mm_processor_kwargs": "model.images",
    # rewards and data
    **dict.fromkeys(("reward_fn", "reward_function", "reward_funcs", "custom_reward_function"), "task.reward"),
    "reward_weights": "task.rewards",
    **dict.fromkeys(("train_file", "train_files", "dataset_path", "dataset_name"), "task.options.file, or data.file"),
    **dict.fromkeys(("val_file", "val_files"), "task.options.held_out_file, or data.held_out_file"),
    # engines
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "repetition_penalty": "rollout.repetition_penalty",
    "presence_penalty": "rollout.presence_penalty",
    "frequency_penalty": "rollout.frequency_penalty",
    **dict.fromkeys(("thinking_token_budget", "max_thinking_tokens", "reasoning_budget"), "rollout.thinking_budget"),
    **dict.fromkeys(("stop", "stop_strings", "stop_sequences"), "rollout.stop"),
    **dict.fromkeys(("tensor_model_parallel_size", "tensor_parallel_size", "tp"), "generator.tensor_parallel"),
    **dict.fromkeys(("data_parallel_size", "num_engines", "num_replicas"), "generator.replicas"),
    **dict.fromkeys(("quant_type", "rollout_quantization", "fp8"), "generator.quantization"),
    "precision": "generator.dtype, generator.quantization or training.mixed_precision_param",
    **dict.fromkeys(("tis_imp_ratio_cap", "rollout_is_threshold", "truncated_importance_sampling_ratio"), _CAP),
    **dict.fromkeys(("use_tis", "rollout_is", "use_importance_sampling_correction"), "algorithm.importance"),
    "vllm_gpu_memory_utilization": "generator.gpu_memory_utilization",
    "batch_invariant": "debug.batch_invariant",
    "helper_generators": "placement.helper_generators",
    **dict.fromkeys(
        ("speculative_config", "speculative_decoding", "num_draft_tokens", "speculative_num_draft_tokens"),
        "generator.speculative",
    ),
    **dict.fromkeys(("free_cache_engine", "vllm_enable_sleep_mode", "vllm_mode", "colocate"), "placement.mode"),
    # what is recorded
    **dict.fromkeys(("save_freq", "save_interval", "save_steps"), "checkpoint.every"),
    "save_total_limit": "checkpoint.keep_latest_k",
    **dict.fromkeys(("eval_interval", "eval_steps", "test_freq", "val_freq"), "eval.every"),
    **dict.fromkeys(("dump_folder", "output_dir", "default_local_dir", "experiment_name", "run_name"), "run.dir"),
    "project_name": "metrics.project",
    "report_to": "metrics.wandb, metrics.trackio or metrics.tensorboard",
    "seed": "run.seed",
}
NOT_HERE = {
    "enforce_eager": "engines capture graphs on a GPU and are eager on a CPU; see generator.torch_compile",
    **dict.fromkeys(
        ("micro_batch_size", "ppo_micro_batch_size_per_gpu", "per_device_train_batch_size", "global_batch_size"),
        _PACKED,
    ),
    "per_device_eval_batch_size": "evaluation takes eval.prompts questions at once",
    "use_vllm": "vLLM samples all answers of every run",
    "gradient_accumulation_steps": _PACKED,
    "do_sample": _DRAWN,
    **dict.fromkeys(
        ("max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill", "swap_space"), _ENGINE
    ),
    "trust_remote_code": _NO_CODE,
    **dict.fromkeys(("logging_steps", "log_freq"), "each step is recorded"),
}
"""Keys without one of ours, and why there is none."""
SECTIONS = {
    **dict.fromkeys(("actor", "actor_rollout_ref", "tokenizer"), "model"),
    **dict.fromkeys(("dataset", "datasets"), "data"),
    **dict.fromkeys(("env", "environment", "reward"), "task"),
    **dict.fromkeys(("evaluation", "validation", "validator"), "eval"),
    **dict.fromkeys(("generation", "orchestrator", "sampler", "sampling"), "rollout"),
    **dict.fromkeys(("inference", "vllm", "engine"), "generator"),
    **dict.fromkeys(("logging", "logger", "wandb", "tracker"), "metrics"),
    **dict.fromkeys(("dpo", "grpo", "loss", "ppo", "rl"), "algorithm"),
    **dict.fromkeys(("ckpt", "checkpointing"), "checkpoint"),
    "fault_tolerance": "recovery",
    "optim": "optimizer",
    "peft": "lora",
    "ref": "reference",
    "scheduler": "lr_scheduler",
    "slurm": "hosts",
    "trainer": "training",
}
SECTIONS_NOT_HERE = {
    **dict.fromkeys(
        ("profiling", "profiler"), "each step's trace is recorded: titan-rl trace and titan-rl watch show it"
    ),
    **dict.fromkeys(
        ("quantize", "quantization", "mx"),
        "[float8] is of training, generator.quantization of rollouts",
    ),
}
