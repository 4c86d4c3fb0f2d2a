"""The arguments of transformers' `TrainingArguments` and `Trainer`, and the keys of this package for the same thing.

People who come from transformers type its names, so messages about an unknown key say what the key is called here.
"""

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

from bert_tasks.data.issues import nearest_or_all

# A text that begins with a capital letter says why there is no such argument.
HF_ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "num_train_epochs": "epochs",
        "per_device_train_batch_size": "batch_size, which counts samples over all devices",
        "per_gpu_train_batch_size": "batch_size, which counts samples over all devices",
        "train_batch_size": "batch_size, which counts samples over all devices",
        "per_device_eval_batch_size": "Evaluation forms its batches by length",
        "gradient_accumulation_steps": "micro_batch_tokens, which limits what a device holds at once",
        "auto_find_batch_size": "micro_batch_tokens, which limits what a device holds at once",
        "lr": "learning_rate",
        "warmup_steps": "warmup_ratio, a share of the steps",
        "fp16": 'mixed_precision="fp16"',
        "bf16": 'mixed_precision="bf16"',
        "save_total_limit": "keep_last",
        "eval_strategy": "eval_steps. Without it, each epoch ends with an evaluation",
        "evaluation_strategy": "eval_steps. Without it, each epoch ends with an evaluation",
        "save_strategy": "save_steps. Each evaluation also saves a checkpoint",
        "logging_strategy": "logging_steps",
        "logging_dir": "trackers, whose files go to output_dir",
        "report_to": "trackers",
        "run_name": "The name of output_dir is the name of the run",
        "data_seed": "seed",
        "load_best_model_at_end": "The model ends with the best weights",
        "greater_is_better": "Each metric knows whether higher or lower is better. lower_is_better names exceptions",
        "overwrite_output_dir": "overwrite",
        "resume_from_checkpoint": "The same call resumes the run in output_dir",
        "train_dataset": "train",
        "eval_dataset": "validation",
        "callbacks": "callback",
        "compute_metrics": "metrics, a function of predictions and references",
        "disable_tqdm": "progress=False",
        "max_seq_length": "the setting max_length of the model's task",
        "max_length": "the setting max_length of the model's task",
        "label_smoothing_factor": "the setting label_smoothing of the model's task",
        "optim": "optimizer",
        "optimizers": "optimizer",
        "train_sampling_strategy": "Batches hold texts of similar lengths, without padding",
        "dataloader_num_workers": "Features are cached in a file, so that no workers are needed",
        "push_to_hub": "Call push after training",
        "hub_model_id": "Call push after training",
        "hub_token": "Call push after training, with the token of huggingface_hub",
        "use_cpu": "Set the environment variable CUDA_VISIBLE_DEVICES to an empty text",
        "local_rank": "The environment of torchrun has the rank of each process",
        "torch_compile": "Training does not compile the model",
        "fsdp": "A model must fit on one device",
        "deepspeed": "A model must fit on one device",
    }
)


def hf_hint(name: str, keys: Collection[str], sections: Mapping[str, Collection[str]] = MappingProxyType({})) -> str:
    """Returns the end of a message, with the key for an argument of transformers or the most similar known key.

    With ``sections``, the sections of a recipe and their keys, the hint is ``section.key``.
    """
    ours = HF_ARGUMENTS.get(name, "")
    if ours == "":
        return nearest_or_all(name, keys)
    if ours[:1].isupper():
        return f". {ours}"
    is_setting = ours.startswith("the setting ")
    key = re.split(r"\W", ours.removeprefix("the setting "))[0]  # without its explanation
    for section, known_keys in sections.items():
        if key in known_keys:
            explanation = "" if is_setting else ours.removeprefix(key)
            return f". Use {section}.{key}{explanation}"
    if sections:
        return nearest_or_all(name, keys)
    if is_setting or key in keys:
        return f". Use {ours}"
    return nearest_or_all(name, keys)
