"""The target model: any Hugging Face causal LM behind one forward(StepRows, cache).

Legend: B sequences, N rows of the pass, D hidden size, V vocabulary.
"""

import inspect
import logging
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from lasd.decoding.attention import NAME, StepRows, step_mask
from lasd.decoding.cache import KVCache, LayerLayout
from lasd.decoding.view import model_view, unwrapped
from lasd.errors import LasdError

log = logging.getLogger(__name__)

NeedLogits = Literal["all", "none"] | Tensor
"""Rows whose logits are wanted: all, none, or one row a sequence (int64 [B])."""

KNOWN_KINDS = {"full_attention", "sliding_attention"}


class _LogitsTap(nn.Module):
    """Stands in the view where the output embedding was: keeps its input, computes the rows that are wanted."""

    def __init__(self, head: nn.Module, device: torch.device):
        super().__init__()
        self.head, self.device = head, device
        self.hidden_BND: Tensor | None = None
        self.need: NeedLogits = "all"

    @property
    def weight(self) -> Tensor:
        return self.head.weight  # type: ignore[return-value]

    def forward(self, hidden_BND: Tensor) -> Tensor:
        hidden_BND = hidden_BND.to(self.device)
        self.hidden_BND = hidden_BND
        if isinstance(self.need, Tensor):
            hidden_BND = hidden_BND[torch.arange(len(hidden_BND), device=hidden_BND.device), self.need].unsqueeze(1)
        elif self.need == "none":
            hidden_BND = hidden_BND[:, :0]
        return self.head(hidden_BND)


class TargetModel:
    """A causal LM that the engine can decode with. The model that was given is never modified.

    Args:
        model: a transformers causal LM (quantised, with adapters or over several devices as it is).
        tokenizer: its tokenizer; None where only token ids are used.
        name: what the user called the model.
        source: the folder or Hub id that it came from.

    Raises:
        LasdError: the family cannot be decoded exactly (its state cannot be rolled back, or its attention is of an
            unknown kind).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        source: str | None = None,
        revision: str | None = None,
        quantization: str | None = None,
    ):
        model = unwrapped(model)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.source = source or getattr(model.config, "name_or_path", "") or type(model).__name__
        self.name, self.revision, self.quantization = name or self.source, revision, quantization
        self.config = model.config.get_text_config()
        _refuse_unsupported(model, self.config)
        self.lm_head = model.get_output_embeddings()
        if self.lm_head is None:
            raise LasdError(f"{type(model).__name__} has no output embedding; lasd decodes causal language models only")
        _warn_of_lost_soft_cap(self.config)
        self._view = model_view(model)
        self._view.config._attn_implementation = NAME
        self._view.config.get_text_config()._attn_implementation = NAME
        self.device = _execution_device(self.lm_head)
        self._tap = _replace_head(self._view, model, self.lm_head, self.device)
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        self.dtype = embedding.dtype
        self.hidden_size: int = getattr(self.lm_head, "in_features", None) or self.lm_head.weight.shape[-1]
        self.vocab_size: int = getattr(self.lm_head, "out_features", None) or self.lm_head.weight.shape[0]
        self.num_layers: int = self.config.num_hidden_layers
        self._windows = _attention_windows(self.config)

    @cached_property
    def max_positions(self) -> int:
        """Tokens that the model can place: prompt and answer together."""
        for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
            value = getattr(self.config, name, None)
            if value:
                return int(value)
        return 2**31

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the generation config's, else the config's, else the tokenizer's."""
        sources = (getattr(self.model, "generation_config", None), self.config, self.tokenizer)
        for source in sources:
            value = getattr(source, "eos_token_id", None)
            if value is not None:
                return tuple(value) if isinstance(value, list | tuple) else (int(value),)
        return ()

    @cached_property
    def layout(self) -> list[LayerLayout]:
        """What each layer keeps for a token, read from the model's own first keys and values."""
        cache = DynamicCache()
        with torch.inference_mode():
            tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            self.model(input_ids=tokens, use_cache=True, **{self._cache_name: cache})
        layout = []
        for layer in cache.layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None:
                raise LasdError(
                    f"{type(self.model).__name__} keeps a state that cannot be rolled back; lasd cannot draft for it"
                )
            layout.append(LayerLayout(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device))
        if len(layout) != self.num_layers:
            raise LasdError(
                f"{type(self.model).__name__} keeps keys for {len(layout)} of {self.num_layers} layers; lasd needs "
                "a cache entry for every layer"
            )
        return layout

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """A cache for `rows` sequences of `capacity` slots."""
        return KVCache(self.layout, rows, capacity)

    @torch.inference_mode()
    def forward(
        self, rows: StepRows, cache: KVCache, need_logits: NeedLogits = "all", first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """One pass over B sequences: writes their rows into the cache behind each length, commits nothing.

        Args:
            rows: tokens, positions and what each row sees.
            cache: sequences first ... first + B - 1 are the rows' own.
            need_logits: "all", "none", or one row a sequence.

        Returns:
            logits [B, N, V] ([B, 1, V] for one row a sequence, [B, 0, V] for none) and hidden states [B, N, D]: the
            output embedding's input.
        """
        size, num_rows = rows.tokens_BN.shape
        cache.begin(first, size, num_rows)
        starts = cache.lengths[first : first + size]
        return self._run(rows, need_logits, self._masks(rows, starts), **{self._cache_name: cache})

    @torch.inference_mode()
    def own_forward(self, rows: StepRows, cache: Cache, starts: list[int]) -> Tensor:
        """The same pass through the user's own model: its own attention, and a full float mask. For comparisons.

        Args:
            cache: any cache that holds `starts[b]` tokens of sequence b; it gets the rows' keys and values.

        Returns:
            logits [B, N, V].
        """
        masks = self._masks(rows, starts, groups=1)
        kwargs = {"attention_mask": masks, self._cache_name: cache}
        return self.model(input_ids=rows.tokens_BN, position_ids=rows.positions_BN, use_cache=True, **kwargs).logits

    @torch.no_grad()
    def hidden_states(self, ids_BN: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Teacher-forced hidden states of right-padded texts: what feeds the output embedding at each token. No
        gradient.

        Args:
            ids_BN: int64; what stands behind a text's length does not matter.
            lengths_B: not needed (attention is causal); accepted so that callers can say it.

        Returns:
            [B, N, D].
        """
        ids_BN = ids_BN.to(self.device)
        positions_BN = torch.arange(ids_BN.shape[1], device=self.device).expand_as(ids_BN)
        rows = StepRows(ids_BN, positions_BN)
        return self._run(rows, "none", self._masks(rows, [0] * len(ids_BN)), use_cache=False)[1]

    def project(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] -> logits [..., V]: the output embedding, then the family's own tail.
        Differentiable."""
        return self.logit_tail(self.lm_head(hidden))

    def logit_tail(self, logits: Tensor) -> Tensor:
        """What the family does to logits after the output embedding: scale (granite, cohere), soft cap (gemma)."""
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (factor := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * factor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @property
    def has_logit_tail(self) -> bool:
        """Whether logits are more than the output embedding's product."""
        names = ("logits_scaling", "logit_scale", "final_logit_softcapping")
        return any(getattr(self.config, name, None) is not None for name in names)

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat with the prompt for the next answer; plain text where the tokenizer has no chat
        template."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            return self.tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        return list(ids["input_ids"])

    def _run(self, rows: StepRows, need_logits: NeedLogits, masks: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._tap.need = need_logits
        try:
            out = self._view(input_ids=rows.tokens_BN, position_ids=rows.positions_BN, attention_mask=masks, **kwargs)
            hidden_BND = self._tap.hidden_BND
            assert hidden_BND is not None
            return out.logits, hidden_BND
        finally:
            self._tap.hidden_BND = None

    def _masks(self, rows: StepRows, starts: list[int], groups: int | None = None) -> Any:
        """The additive masks that the family's layers ask for, or None where causal attention is all there is.

        Args:
            groups: query heads that are folded into rows; by default all of a key-value head.
        """
        num_rows = rows.tokens_BN.shape[1]
        visible = max(starts) + num_rows
        plain = rows.block_mask_BNN is None and rows.visible_prefix_BN is None
        causal = plain and (visible == num_rows or (num_rows == 1 and len(set(starts)) == 1))

        def mask(window: int | None) -> Tensor | None:
            window = window if window is not None and window < visible else None
            if causal and window is None:
                return None
            folded = groups or self.config.num_attention_heads // self.layout[0].heads
            return step_mask(rows, starts, visible, window, folded, self.dtype)

        masks = {kind: mask(window) for kind, window in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _execution_device(head: nn.Module) -> torch.device:
    """Where the output embedding computes (accelerate may keep its weights elsewhere): tokens and heads live there."""
    hook = getattr(head, "_hf_hook", None)
    for part in (hook, *getattr(hook, "hooks", ())):
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return head.weight.device  # type: ignore[return-value]


def _replace_head(view: nn.Module, model: PreTrainedModel, head: nn.Module, device: torch.device) -> _LogitsTap:
    for path, module in model.named_modules():
        if module is head:
            parent, _, name = path.rpartition(".")
            tap = _LogitsTap(view.get_submodule(path), device)
            view.get_submodule(parent)._modules[name] = tap
            return tap
    raise LasdError(
        f"the output embedding of {type(model).__name__} is not one of its modules; lasd cannot read hidden states"
    )


def refuse_config(config: Any) -> None:
    """Raises a `LasdError` for a family that its config shows to be undecodable: told before any weights are read."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise LasdError(
            f"{config.model_type} is an encoder-decoder model; lasd decodes causal (decoder-only) language models: use "
            "one of these, or transformers' own generate"
        )
    kinds = set(getattr(text, "layer_types", None) or ()) - KNOWN_KINDS
    if kinds:
        raise LasdError(
            f"{text.model_type} has layers of kind {', '.join(sorted(kinds))}; their state cannot be rolled back after "
            "a rejected draft, so lasd cannot decode it exactly; use a model with full or sliding attention"
        )


def _refuse_unsupported(model: PreTrainedModel, config: Any) -> None:
    refuse_config(model.config)
    if getattr(model, "_is_stateful", False):
        raise LasdError(
            f"{config.model_type} keeps a recurrent state that cannot be rolled back after a rejected draft; use an "
            "attention model"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise LasdError(
            f"{type(model).__name__} does not go through transformers' attention interface; lasd cannot give it a "
            "tree mask; "
            "use a model whose attention does"
        )


def _warn_of_lost_soft_cap(config: Any) -> None:
    """Transformers lets gemma2 use sdpa in some releases (5.17), though sdpa has no soft cap."""
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        log.warning(
            "this %s was loaded with sdpa attention, which leaves out its soft cap; lasd applies it, so answers differ "
            "from the model's own generate; load it with attn_implementation='eager'",
            config.model_type,
        )


def _attention_windows(config: Any) -> dict[str, int | None]:
    """The masks that the family's layers ask for: kind -> window (None: no limit)."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return {"full_attention": window}
    found = dict.fromkeys(kinds)
    windows: dict[str, int | None] = {kind: window if kind == "sliding_attention" else None for kind in found}
    return windows
