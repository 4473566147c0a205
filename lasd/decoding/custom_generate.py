"""The decoder behind `model.generate(..., custom_generate=decoder)`: transformers prepares, lasd decodes.

Legend: B rows of the batch (num_return_sequences expanded), L padded prompt tokens, T longest answer.
"""

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lasd.decoding.sampling import SamplingParams
from lasd.errors import LasdError

if TYPE_CHECKING:
    from lasd.decoding.decoder import Decoder


def decode_for_transformers(
    decoder: "Decoder",
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    attention_mask: Tensor | None = None,
    streamer: Any = None,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Answers a batch as `generate` would, greedy or sampling.

    Prompts may be left-padded; processors see the padded prompt, as they do in `generate`. Sampling draws its seeds
    from torch's global generator, so `torch.manual_seed` makes it repeatable.

    A streamer is passed as `token_streamer=`: transformers keeps `streamer=` from functions given as `custom_generate`.

    Returns:
        int64 [B, L + T]: prompts as given, answers padded with the pad token; or, with `return_dict_in_generate`, an
        output object that holds them as `sequences`.

    Raises:
        LasdError: another model than the decoder's target, beams, or outputs that only a step-by-step loop has.
    """
    _refuse(decoder, model, generation_config)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if bool((mask[:, :-1] > mask[:, 1:]).any()):
        raise LasdError("the batch is padded on the right; set the tokenizer's padding_side to 'left' for generation")
    padded = [row.tolist() for row in input_ids]
    starts = [int(length) for length in (mask == 0).sum(1)]
    prompts = [ids[start:] for ids, start in zip(padded, starts, strict=True)]
    limit = min(
        (c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)),
        default=generation_config.max_length,
    )
    eos = {int(i) for c in stopping_criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.flatten()}
    other = tuple(c for c in stopping_criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria))
    seeds = torch.randint(2**62, (len(prompts),)).tolist() if generation_config.do_sample else [0] * len(prompts)
    params = [
        SamplingParams(
            max_new_tokens=limit - input_ids.shape[1],
            temperature=1.0 if generation_config.do_sample else 0.0,
            seed=seed,
            eos_token_ids=tuple(eos),
            processors=_of_row(logits_processor or (), row),
            stopping=other,
            padding=tuple(ids[:start]),
        )
        for row, (ids, start, seed) in enumerate(zip(padded, starts, seeds, strict=True))
    ]
    on_tokens = (lambda _, tokens: streamer.put(torch.tensor(tokens))) if streamer is not None else None
    answers = [result.tokens for result in decoder.generate(prompts, params, on_tokens=on_tokens)]
    if streamer is not None:
        streamer.end()
    longest = max(len(answer) for answer in answers)
    pad = generation_config.pad_token_id
    pad = pad if pad is not None else (min(eos) if eos else 0)
    tail = torch.tensor([answer + [pad] * (longest - len(answer)) for answer in answers], device=input_ids.device)
    sequences = torch.cat([input_ids, tail], 1)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _of_row(processors: Iterable[Any], row: int) -> tuple[Any, ...]:
    """The batch's processors as one row needs them: a repetition penalty knows each row's padding."""
    own = []
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = int(ignored[row])
        own.append(processor)
    return tuple(own)


def _refuse(decoder: "Decoder", model: Any, config: Any) -> None:
    if model is not decoder.target.model:
        raise LasdError(
            f"the decoder was made for {decoder.target.name}; call generate on that very model, or make a decoder "
            "for this one"
        )
    if (config.num_beams or 1) > 1:
        raise LasdError(
            f"num_beams is {config.num_beams}; lasd decodes greedily or by sampling: set num_beams=1, or use "
            "transformers' own generate"
        )
    wanted = [
        name
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        if getattr(config, name, False)
    ]
    if wanted:
        raise LasdError(
            f"{', '.join(wanted)} cannot be returned: verified drafts have no step-by-step outputs; leave them out"
        )
