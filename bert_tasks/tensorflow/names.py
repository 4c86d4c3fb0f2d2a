"""Parameter names of google-research/bert, albert and electra (TensorFlow 1)."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from bert_tasks.families.base import OLD_PARAMETERS

# Google's names of parameters -> the names of Hugging Face. A kernel is transposed.
_PARAMETERS: Mapping[str, str] = MappingProxyType(
    {
        "kernel": "weight",
        "output_weights": "weight",
        "output_bias": "bias",
        **OLD_PARAMETERS,
        **{f"{name}_embeddings": f"{name}_embeddings.weight" for name in ("word", "position", "token_type")},
    }
)
# Variables that optimizers and the training loop store beside the parameters.
_TRAINING_STATE = (
    r"(^|/)(adam_[mv]|lamb_[mv]|Adam(_1)?|LAMB(_1)?|AdamWeightDecayOptimizer(_1)?|ExponentialMovingAverage|"
    r"beta[12]_power|global_step|temperature)$"
)


@dataclass(frozen=True, kw_only=True)
class TF1Names:
    """The names of one model (ELECTRA's checkpoints hold two models).

    Attributes:
        family: Family's ``model_type``.
        marker: Prefix of variables that only checkpoints of this model have.
        config_file: File name of the configuration beside the checkpoint, in fields of Hugging Face, or None.
        renames: Regular expressions to replace in a variable's name, in this order. The result is Hugging Face's name
            with slashes for dots, up to the parameter.
        dropped: Regular expression of variables that are no part of this model.
        sizes: Fields of config.json -> the parameter and the dimension that state them if there is no config file.
        gelu: Activation that the config file calls ``gelu``.
    """

    family: str
    marker: str
    config_file: str | None
    renames: tuple[tuple[str, str], ...]
    dropped: str = r"(?!)"
    sizes: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    gelu: str = "gelu"

    def parameters(self, variables: Iterable[str]) -> dict[str, tuple[str, bool]]:
        """Maps Hugging Face's names to variables, and to True if they are transposed."""
        return {name: (variable, transposed) for variable in variables for name, transposed in self._names(variable)}

    def _names(self, variable: str) -> list[tuple[str, bool]]:
        name = variable.removeprefix("module/")  # modules of TensorFlow Hub
        if re.search(_TRAINING_STATE, name) or re.search(self.dropped, name):
            return []
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        module, slash, parameter = name.rpartition("/")
        current = f"{module}{slash}{_PARAMETERS.get(parameter, parameter)}"
        return [(current.replace("/", "."), parameter == "kernel")]


_LAYER = (r"/layer_(\d+)/", r"/layer/\1/")
_BERT = TF1Names(
    family="bert",
    marker="bert/encoder/layer_",
    config_file="bert_config.json",
    renames=(_LAYER, (r"^output_", "classifier/output_"), (r"^cls/squad/", "qa_outputs/")),
)
_ALBERT = TF1Names(
    family="albert",
    marker="bert/encoder/transformer/",
    config_file="albert_config.json",
    renames=(
        (r"^bert/", "albert/"),
        (r"/transformer/group_(\d+)/inner_group_(\d+)/", r"/albert_layer_groups/\1/albert_layers/\2/"),
        (r"/attention_1/self/", "/attention/"),
        (r"/attention_1/output/dense/", "/attention/dense/"),
        (r"/ffn_1/intermediate/output/dense/", "/ffn_output/"),
        (r"/ffn_1/intermediate/dense/", "/ffn/"),
        (r"(/albert_layers/\d+)/LayerNorm_1/", r"\1/full_layer_layer_norm/"),
        (r"(/albert_layers/\d+)/LayerNorm/", r"\1/attention/LayerNorm/"),
        (r"/pooler/dense/", "/pooler/"),
        (r"^cls/predictions/(transform/)?", "predictions/"),
        (r"^cls/seq_relationship/", "sop_classifier/classifier/"),
        (r"^output_", "classifier/output_"),
        (r"^cls/squad/", "qa_outputs/"),
    ),
    # The heads of run_squad_v2.py, which Hugging Face does not have.
    dropped=r"^(start_logits|end_logits|answer_class)/",
    gelu="gelu_new",  # Google's program calls the approximation with tanh gelu
)
_DISCRIMINATOR = TF1Names(
    family="electra",
    marker="electra/encoder/",
    config_file=None,
    renames=(_LAYER, (r"/dense_1/", "/dense_prediction/")),
    # The heads of run_finetuning.py are not the heads of Hugging Face.
    dropped=r"^(generator|generator_predictions|task_specific)/",
    sizes={
        "vocab_size": ("electra.embeddings.word_embeddings.weight", 0),
        "embedding_size": ("electra.embeddings.word_embeddings.weight", 1),
        "max_position_embeddings": ("electra.embeddings.position_embeddings.weight", 0),
        "type_vocab_size": ("electra.embeddings.token_type_embeddings.weight", 0),
        "hidden_size": ("electra.encoder.layer.0.intermediate.dense.weight", 1),
        "intermediate_size": ("electra.encoder.layer.0.intermediate.dense.weight", 0),
    },
)
# The generator shares the discriminator's embeddings, or has its own.
_GENERATOR = replace(
    _DISCRIMINATOR,
    marker="generator/encoder/",
    renames=(
        _LAYER,
        (r"^generator/", "electra/"),
        (r"^generator_predictions/output_bias$", "generator_lm_head/output_bias"),
    ),
    dropped=r"^(electra/encoder|electra/embeddings_project|discriminator_predictions|task_specific)/",
)
_UNTIED_GENERATOR = replace(
    _GENERATOR, marker="generator/embeddings/", dropped=r"^(electra|discriminator_predictions|task_specific)/"
)
# In the order of choice, if a checkpoint holds several.
MODELS = (_BERT, _ALBERT, _DISCRIMINATOR, _UNTIED_GENERATOR, _GENERATOR)
