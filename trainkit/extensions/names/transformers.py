"""What to use here for a setting of transformers' TrainingArguments; docs/migrate.md has the same
table.
"""

from __future__ import annotations

from trainkit.extensions.names.lightning import each

TRAINING_ARGUMENTS = each(
    {
        "output_dir": "In its place: run_dir.",
        "num_train_epochs max_steps": (
            "In its place: trainer.max_epochs, trainer.max_steps. What is reached first ends the"
            " run; for steps alone trainer.max_epochs=null."
        ),
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
            " `trainer.lr_scaling=none`. The decay is 0 there by default, and torch's 0.01 here."
        ),
        "lr_scheduler_type lr_scheduler_kwargs": (
            "In its place: lr=cosine. Also step, polynomial, and wsd for `warmup_stable_decay`;"
            " `linear`, the default there, is `lr=polynomial lr.power=1`. Warm-up multiplies the"
            " schedule here; there it comes before it."
        ),
        "warmup_steps": (
            "In its place: trainer.lr_warmup_steps. A number of steps, never a share of the run;"
            " the first step has 1/N of the rate here, and 0 there."
        ),
        "max_grad_norm": (
            "In its place: trainer.gradient_clip_val. 1.0 there, none here by default."
        ),
        "bf16 fp16": "In its place: trainer.precision. `bf16-mixed`, `16-mixed`.",
        "gradient_checkpointing gradient_checkpointing_kwargs": (
            "In its place: trainer.activation_checkpointing."
        ),
        "tf32": "In its place: trainer.float32_matmul_precision.",
        "label_smoothing_factor": (
            "In its place: Task.training_step. An argument of torch.nn.functional.cross_entropy."
        ),
        "optim": (
            "In its place: optimizer=adamw. Also schedule_free and more: conf/optimizer. The rate of"
            " optimizer=adafactor is a share of each weight's root mean square; there it is the size"
            " of the update."
        ),
        "average_tokens_across_devices": (
            "In its place: Task.batch_weight. As of `conf=hf_causal_lm`; it counts the tokens that"
            " are predicted."
        ),
        "torch_compile": "In its place: trainer.compile.",
        "eval_strategy eval_steps": (
            "In its place: trainer.val_check_interval, trainer.check_val_every_n_epoch. Updates of"
            " the epoch; with check_val_every_n_epoch=null those of the run, as there. A share is one"
            " of an epoch here, of the run there."
        ),
        "eval_accumulation_steps batch_eval_metrics prediction_loss_only": (
            "In its place: Task.validation_step. Sums of each batch are held, no predictions."
        ),
        "logging_steps logging_strategy logging_first_step": (
            "In its place: trainer.log_every_n_steps. A step's value; there the mean since the last"
            " one."
        ),
        "disable_tqdm": "In its place: trainer.enable_progress_bar.",
        "save_strategy save_steps save_total_limit save_only_model": (
            "In its place: callbacks=checkpoint. `callbacks.checkpoint.every_n_train_steps`,"
            " `save_top_k`, `save_weights_only`. With `monitor`, save_top_k holds the best ones, and"
            " there the newest."
        ),
        "metric_for_best_model greater_is_better load_best_model_at_end": (
            "In its place: callbacks=checkpoint. `callbacks.checkpoint.monitor`, `mode`;"
            " `ckpt_path=best`. `mode` is min unless you set max; there only of a loss."
        ),
        "report_to": (
            "In its place: logger=wandb. Also tensorboard, mlflow, csv, jsonl, prometheus."
        ),
        "seed data_seed": "In its place: seed.",
        "dataloader_num_workers dataloader_drop_last dataloader_pin_memory"
        " dataloader_persistent_workers dataloader_prefetch_factor": (
            "In its place: data.num_workers. Or the loader of your DataModule, as you make it."
        ),
        "train_sampling_strategy length_column_name": (
            "In its place: DataLoader(batch_sampler=...). Your own, in a trainkit.DataModule."
        ),
        "use_cpu": "In its place: engine.device. `engine.device=cpu`.",
        "full_determinism": "In its place: trainer.deterministic.",
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
        "neftune_noise_alpha push_to_hub": ("`pretrained/` is a folder that `hf upload` takes."),
    }
)
