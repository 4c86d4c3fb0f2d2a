"""``Encoder``, a published encoder with transformers' call, and its embeddings.

An encoder has no task: it returns hidden states, and one vector for each text. Embeddings are computed as the
predictions of the task ``embedding``, so that they are batched, truncated and written as all other predictions.

Shape legend: B sequences, T padded length, H hidden, R texts.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bert_tasks.checkpoints.adapters import model_weights
from bert_tasks.checkpoints.hub import Origin, origin
from bert_tasks.checkpoints.load import match_weights
from bert_tasks.checkpoints.save import file_tensors, hf_tensors, save_folder
from bert_tasks.checkpoints.sentence_transformers import SentenceSettings, read_sentence_settings
from bert_tasks.checkpoints.stored_tokenizers import open_tokenizer
from bert_tasks.data.reading import is_frame
from bert_tasks.data.trained_reading import TrainedReading
from bert_tasks.encoder.layers import initialize
from bert_tasks.errors import CheckpointError, DataError, UsageError
from bert_tasks.families import CONFIG_KEY, encoder_config, family_of, parameter_map, pooler_is_there
from bert_tasks.model.loading import open_checkpoint
from bert_tasks.model.prediction import predict_rows
from bert_tasks.model.pretrained_module import PretrainedModule, padded_inputs
from bert_tasks.model.task_model import TaskModel
from bert_tasks.tasks.embedding import Embedding, EmbeddingPooling, EmbeddingPrediction


class Encoder(PretrainedModule):
    """The encoder of any family, without a head and without a task.

    Use it if you need vectors: ``embed`` returns one for each text, and a call returns the hidden state of each token,
    as transformers' ``AutoModel`` does. For predictions of labels, spans or numbers use ``TaskModel``. The folder of a
    trained model can be opened, too, and its head is then left out.

    Attributes:
        config, hf_config: The configuration of the encoder, and ``config.json`` as loaded.
        pooler (Linear or None): The base model's linear layer on the first token, if the file has one. The call does
            not apply it. It is kept so that a saved folder is complete for transformers.
        load_report: What became of each key of the file. None for a model that was built from a configuration.
        columns: The task's columns -> their names in the training data of a model that was trained here.
        sentence_settings: How sentence-transformers embeds texts with these weights. None if it did not write them.
        origin: The name that the encoder was loaded by, and the hub's commit. None for one from a configuration.

    Examples:
        >>> len(Encoder.from_pretrained(base).embed(["Cold soup.", "Kind staff."]))
        2
    """

    def __init__(self, hf_config: Mapping[str, Any], *, pooler: bool = False) -> None:
        super().__init__(hf_config)
        self.pooler: nn.Linear | None = None
        if pooler:
            self.pooler = nn.Linear(self.config.hidden_size, self.config.hidden_size)
        self.columns: Mapping[str, str] = {}
        self.reading = TrainedReading()
        self.sentence_settings: SentenceSettings | None = None
        self.origin: Origin | None = None
        initialize(self, self.config)

    @classmethod
    def from_pretrained(cls, name: str | Path, *, revision: str | None = None) -> Self:
        """Loads published weights in float32, in evaluation mode.

        A head in the files is ignored, so any checkpoint of a supported family can be opened. A tokenizer is loaded if
        the folder has one. Only ``embed`` needs it.

        Args:
            name: A folder, an id on the Hugging Face Hub, or ``package:NAME/PATH`` for weights inside an installed
                package. A folder of the library peft stands for the model that it names, with its adapters merged into
                the weights.
            revision: Branch, tag or commit of a hub id. Default: the branch ``main``.

        Returns:
            The encoder on the CPU.

        Raises:
            CheckpointError: Files are missing or damaged, the family is not supported, or a key does not fit.

        Examples:
            >>> Encoder.from_pretrained(base).config.vocab_size == model.config.vocab_size
            True
        """
        described = open_checkpoint(name, revision=revision)
        folder, hf_config = described.path, described.hf_config
        family, config = family_of(hf_config), encoder_config(hf_config)
        names = parameter_map(family, config, head="base", pooler=True)
        # On the device "meta" tensors have shapes and no numbers, so nothing is drawn that the file replaces anyway.
        with torch.device("meta"):
            model = cls(hf_config, pooler=True)
        shapes = {key: value.shape for key, value in model.state_dict().items()}
        tensors = model_weights(folder, family)
        if not pooler_is_there(family, tensors):
            model.pooler = None
            names = parameter_map(family, config, head="base", pooler=False)
        matched = match_weights(tensors, names, shapes=shapes, family=family, head_may_be_new=False)
        model.load_state_dict(matched.tensors, assign=True)
        model.load_report = matched.report
        model.tokenizer = open_tokenizer(
            described.tokenizer_path, vocab_size=config.vocab_size, second=config.second_segment, required=False
        )
        model.columns, model.reading = described.columns, described.reading
        model.sentence_settings = read_sentence_settings(folder)
        model.origin = origin(name, folder, revision=revision)
        return model.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the last hidden states ``[B, T, H]``, with zeros at padding.

        The call has the arguments of transformers' ``AutoModel``, so it can replace one in existing code. The states at
        padding are zeros here, whereas transformers leaves arbitrary numbers there.

        Args:
            input_ids: ``[B, T]`` ids of the tokens.
            attention_mask: ``[B, T]``, 1 for tokens and 0 for padding, which may be on either side or in between.
                Default: all ones.
            token_type_ids: ``[B, T]`` segments. Default: all zeros.
            position_ids: ``[B, T]`` positions. Default: the positions that transformers computes for the family.
            output_hidden_states: True to return the states of all layers, too.
            output_attentions: Must be False, because attention weights are never computed as a whole.

        Returns:
            The last hidden states. With ``output_hidden_states`` a pair of them and of a tuple of ``[B, T, H]``, which
            holds the states of the embeddings and of every layer in transformers' order.

        Raises:
            ValueError: A mask is not ``[B, T]``, an input is too long, an id has no embedding, or attention weights are
                asked for.

        Examples:
            >>> input_ids = torch.tensor([[101, 7, 8, 102]])
            >>> tuple(encoder(input_ids).shape) == (1, 4, encoder.config.hidden_size)
            True
        """
        inputs = padded_inputs(self.config, input_ids, attention_mask, token_type_ids, position_ids, output_attentions)
        states: list[Tensor] | None = [] if output_hidden_states else None
        hidden = self.encoder(
            inputs.input_ids, inputs.position_ids, inputs.token_type_ids, inputs.layout, hidden_states=states
        )
        last = inputs.rectangle(hidden)
        if states is None:
            return last
        return last, tuple(inputs.rectangle(state) for state in states)

    def embed(
        self,
        texts: str | Iterable[str],
        *,
        pooling: EmbeddingPooling | None = None,
        normalize: bool = True,
        layer: int = -1,
        max_length: int | None = None,
        prompt: str | None = None,
    ) -> NDArray[np.float32]:
        """Returns a vector for each text, as sentence-transformers computes it.

        Use the vectors for semantic search, clustering, or as features of another model. They are all held in memory:
        a million texts with H = 384 take 1.5 GB, so use ``embed_file`` for larger data. Texts of similar lengths are
        run together without padding, so their order does not matter for speed. The vectors are computed on the
        encoder's device in the precision of its weights, without dropout.

        Args:
            texts: A list of texts, or one text. They are lowercased if the sentence-transformers files say so.
            pooling: ``"mean"`` over the tokens of a text, special tokens included, ``"cls"``, the state of the first
                token, or ``"max"``, the largest value of each of the H numbers. Default: as in the
                sentence-transformers files, else ``"mean"``.
            normalize: True (default) to scale each vector to length 1 (L2 norm). The dot product of two vectors is
                then their cosine similarity.
            layer: Index of transformers' hidden states: -1 (default) is the last layer, 0 the embeddings of the tokens.
                Later layers do not run.
            max_length: Maximum length in tokens, special tokens included. Longer texts are truncated. Default: the
                limit of the sentence-transformers files, else of the tokenizer.
            prompt: Text to put in front of each text, for models that were trained with one, such as
                ``"query: "``. Default: as in the sentence-transformers files, else none.

        Returns:
            A float32 array ``[R, H]`` in the order of the texts, and ``[H]`` for a single text.

        Raises:
            DataError: A value is not a text.
            UsageError: The encoder has no tokenizer, or there is no such pooling, layer or length.
            CheckpointError: The sentence-transformers files ask for a pooling that this package does not compute.

        Examples:
            >>> vectors = encoder.embed(["Cold soup.", "Kind staff."])
            >>> similarity = vectors @ vectors.T
            >>> similarity.shape
            (2, 2)
        """
        if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
            raise DataError(f"expected a text or a list of texts, not {type(texts).__name__}")
        if is_frame(texts):
            raise DataError(f"expected a text or a list of texts, not {type(texts).__name__}. Pass one of its columns")
        model = self.embedding_model(
            pooling=pooling, normalize=normalize, layer=layer, max_length=max_length, prompt=prompt
        )
        several = [texts] if isinstance(texts, str) else texts
        # A generator, so that a stream of texts is read in chunks and is never held as rows.
        rows = ({"text": text} for text in several)
        vectors = [prediction.embedding for prediction in predict_rows(model, rows)]
        if not vectors:  # np.stack rejects an empty list
            return np.empty((0, self.config.hidden_size), np.float32)
        array = np.stack(vectors)  # [R, H]
        if isinstance(texts, str):
            (array,) = array  # the only row, [H]
        return array

    def embedding_model(
        self,
        *,
        pooling: EmbeddingPooling | None = None,
        normalize: bool = True,
        layer: int = -1,
        max_length: int | None = None,
        prompt: str | None = None,
    ) -> TaskModel[EmbeddingPrediction]:
        """Returns a model with this encoder's modules that predicts as ``embed`` does.

        What the caller leaves open is as sentence-transformers' files say, or else the usual default.

        Args:
            pooling, normalize, layer, max_length, prompt: See ``embed``.

        Raises:
            UsageError: There is no such layer, pooling or length.
            CheckpointError: The files ask for a pooling that this package does not compute.
        """
        states, settings = len(self.encoder.layer_order) + 1, self.sentence_settings
        if type(layer) is not int or not -states <= layer < states:
            raise UsageError(
                f"layer is {layer!r}, expected a whole number from {-states} to {states - 1} (0 is the embeddings)"
            )
        if pooling is None and settings is not None and settings.unsupported is not None:
            raise CheckpointError(
                f"the model's {settings.unsupported}, which bert_tasks does not support. Set pooling to mean, cls or "
                "max to embed texts without it"
            )
        used_pooling: Any = pooling
        if pooling is None:
            used_pooling = "mean" if settings is None else settings.pooling
        if prompt is None:
            prompt = "" if settings is None else settings.prompt
        if max_length is None:
            max_length = self.config.usable_length
            if settings is not None and settings.max_length is not None:
                max_length = min(max_length, settings.max_length)
            elif self._tokenizer is not None:
                # Without a limit in the files transformers sets 1e30, so the minimum is the number of positions.
                max_length = min(max_length, int(self._tokenizer.model_max_length))
        try:
            task = Embedding.of(
                pooling=used_pooling,
                normalize=normalize,
                depth=layer % states,  # -1 is the last of the states
                max_length=max_length,
                prompt=prompt,
                lowercase=settings is not None and settings.lowercase,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        if task.prompt and task.pooling != "cls" and settings is not None and not settings.pools_prompt:
            raise CheckpointError(
                f"the model's {settings.source} leaves the tokens of the prompt out of the {task.pooling} "
                "(include_prompt = false), which bert_tasks does not support. Set prompt to an empty text to embed "
                "texts without a prompt"
            )
        # The encoder of the new model is replaced at once, so its weights need no memory.
        with torch.device("meta"):
            model = TaskModel(self.hf_config, task)
        model.encoder, model.tokenizer = self.encoder, self._tokenizer
        model.columns, model.reading, model.origin = self.columns, self.reading, self.origin
        return model.train(self.training)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a folder that ``AutoModel`` opens, with the tokenizer's files.

        The keys have the names of transformers' base model, and labels or a task in ``config.json`` are left out.

        Args:
            folder: A new folder, or one whose model files are replaced.

        Raises:
            CheckpointError: The folder cannot be written.

        Examples:
            >>> encoder.save_pretrained("encoder")
            >>> Encoder.from_pretrained("encoder").config == encoder.config
            True
        """
        family = family_of(self.hf_config)
        names = parameter_map(family, self.config, head="base", pooler=self.pooler is not None)
        tensors = file_tensors(hf_tensors(self.state_dict(), names, strip_prefix=family.prefix), family)
        of_a_head = (CONFIG_KEY, "id2label", "label2id", "problem_type")
        kept = {key: value for key, value in self.hf_config.items() if key not in of_a_head}
        config = {**kept, "architectures": [family.architectures["base"]]}
        save_folder(Path(folder), config=config, tensors=tensors, tokenizer=self._tokenizer)
