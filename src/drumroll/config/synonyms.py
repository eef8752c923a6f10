"""What other libraries (TRL, transformers, verl, OpenRLHF) call the keys of a config, for the hints in error messages and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

_ELSEWHERE: Mapping[tuple[str, ...], str] = {
    ("model.path",): "model_name_or_path model_name model_id pretrain base_model",
    ("model.dtype",): "torch_dtype precision bf16 fp16",
    ("name",): "run_name experiment_name",
    ("run_dir",): "output_dir save_dir default_local_dir",
    ("max_steps", "sft.steps", "preference.steps"): "max_steps total_steps total_training_steps max_train_steps num_train_steps",
    ("data.train.path", "sft.data.path", "preference.data.path"): "dataset dataset_name train_dataset train_files prompt_data",
    ("data.heldout.path", "heldout.path"): "eval_dataset val_dataset val_files test_files",
    ("prompt_field",): "prompt_key input_key prompt_column",
    ("rewards",): "reward reward_funcs reward_fn reward_function reward_functions",
    ("lr",): "learning_rate actor_learning_rate",
    ("critic.lr",): "critic_learning_rate",
    ("schedule",): "lr_scheduler_type lr_scheduler",
    ("warmup_updates",): "warmup_steps lr_warmup_steps",
    ("trainer.betas",): "adam_beta1 adam_beta2 adam_betas",
    ("trainer.eps",): "adam_epsilon adam_eps",
    ("trainer.max_grad_norm",): "grad_clip clip_grad gradient_clipping",
    ("trainer.micro_batch_tokens",): "per_device_train_batch_size micro_batch_size micro_train_batch_size gradient_accumulation_steps",
    ("trainer.lora",): "use_lora use_peft peft_config",
    ("trainer.lora.rank",): "lora_r lora_rank",
    ("trainer.lora.alpha",): "lora_alpha",
    ("rollout.groups_per_step", "sft.batch_size", "preference.batch_size"): "batch_size train_batch_size rollout_batch_size",
    ("rollout.group_size",): "num_generations n_samples_per_prompt num_return_sequences",
    ("rollout.sampling.max_new_tokens",): "max_completion_length max_response_length response_length generate_max_len",
    ("rollout.num_env_workers",): "num_workers num_env",
    ("engine.context_tokens",): "max_prompt_length max_length max_seq_length max_seq_len max_model_len",
    ("engine.kind",): "use_vllm inference_engine",
    ("engine.memory_share",): "gpu_memory_utilization vllm_gpu_memory_utilization",
    ("algo.kl.coef", "preference.beta"): "beta kl_coef kl_loss_coef init_kl_coef kl_beta",
    ("algo.kl",): "ref_model reference_model",
    ("algo.loss.clip_low", "algo.loss.clip_high"): "epsilon clip_range cliprange clip_ratio clip_eps",
    ("algo.loss.clip_low",): "epsilon_low clip_ratio_low",
    ("algo.loss.clip_high",): "epsilon_high clip_ratio_high",
    ("algo.loss.kind", "algo.aggregation"): "loss_type",
    ("algo.aggregation",): "loss_agg_mode",
    ("algo.advantage.kind",): "algorithm adv_estimator advantage_estimator",
    ("algo.advantage.scale_by_std",): "scale_rewards norm_adv_by_std_in_grpo",
    ("algo.epochs_per_step",): "num_iterations ppo_epochs",
    ("algo.updates_per_step",): "mini_batch_size ppo_mini_batch_size num_mini_batches",
    ("algo.entropy_coef",): "entropy_coeff ent_coef entropy_loss_coef",
    ("teacher.path",): "teacher_model teacher_model_name_or_path",
    ("devices",): "gpus num_gpus n_gpus n_gpus_per_node nnodes world_size",
    ("tp",): "tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size",
    ("checkpoint.every",): "save_steps save_freq save_interval",
    ("checkpoint.keep_last",): "save_total_limit",
    ("eval.every", "preference.eval_every"): "eval_steps test_freq eval_interval",
    ("record",): "report_to logger",
    ("record.wandb.project",): "wandb_project project_name",
}

SYNONYMS: Mapping[str, tuple[str, ...]] = {name: keys for keys, names in _ELSEWHERE.items() for name in names.split()}
"""What somebody may write → the dotted keys that it may stand for, or their endings. Of these some exist in one pipeline alone."""
