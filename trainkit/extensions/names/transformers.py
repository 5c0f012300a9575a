"""What to use here for a setting of transformers' TrainingArguments; docs/migrate.md has the same
table.
"""

from __future__ import annotations

from trainkit.extensions.names.lightning import each

TRAINING_ARGUMENTS = each(
    {
        "output_dir": "In its place: run_dir.",
        "num_train_epochs max_steps": "In its place: trainer.max_epochs, trainer.max_steps.",
        "per_device_train_batch_size per_device_eval_batch_size": (
            "In its place: data.batch_size. One rank's microbatch."
        ),
        "gradient_accumulation_steps": (
            "In its place: trainer.accumulate_grad_batches. Or `trainer.global_batch_size`,"
            " and it is derived."
        ),
        "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon": (
            "In its place: optimizer.lr, optimizer.weight_decay. `optimizer=adamw`, with"
            " betas and eps; the rate is that of one rank's batch unless"
            " `trainer.lr_scaling=none`."
        ),
        "lr_scheduler_type": (
            "In its place: lr=cosine. Also step, polynomial, and wsd for `warmup_stable_decay`."
        ),
        "warmup_steps": "In its place: trainer.lr_warmup_steps.",
        "max_grad_norm": (
            "In its place: trainer.gradient_clip_val. 1.0 there, none here by default."
        ),
        "bf16 fp16": "In its place: trainer.precision. `bf16-mixed`, `16-mixed`.",
        "gradient_checkpointing": "In its place: trainer.activation_checkpointing.",
        "torch_compile": "In its place: trainer.compile.",
        "eval_strategy eval_steps": (
            "In its place: trainer.val_check_interval, trainer.check_val_every_n_epoch."
        ),
        "logging_steps": "In its place: trainer.log_every_n_steps.",
        "save_steps save_total_limit save_only_model": (
            "In its place: callbacks=checkpoint. `callbacks.checkpoint.every_n_train_steps`,"
            " `save_top_k`, `save_weights_only`."
        ),
        "metric_for_best_model greater_is_better load_best_model_at_end": (
            "In its place: callbacks=checkpoint. `callbacks.checkpoint.monitor`, `mode`;"
            " `ckpt_path=best`."
        ),
        "report_to": (
            "In its place: logger=wandb. Also tensorboard, mlflow, csv, jsonl, prometheus."
        ),
        "seed data_seed": "In its place: seed.",
        "dataloader_num_workers dataloader_drop_last": (
            "In its place: data.num_workers. Or the loader of your DataModule, as you make it."
        ),
        "fsdp deepspeed": "In its place: engine=fsdp. Also `engine=deepspeed`; large models.",
        "ddp_find_unused_parameters": (
            "In its place: engine=ddp. Layers without a gradient need no setting."
        ),
        "resume_from_checkpoint": (
            "In its place: ckpt_path. `ckpt_path=last` or `resume=auto`: exact, in the middle"
            " of an epoch too."
        ),
        "auto_find_batch_size": (
            "In its place: trainer.halve_batch_on_oom. The global batch stays as it is."
        ),
        "neftune_noise_alpha push_to_hub": (
            "`pretrained/` is a folder that `huggingface-cli upload` takes."
        ),
    }
)
