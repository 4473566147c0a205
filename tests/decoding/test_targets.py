"""What a target may be: of half precision, quantised, with an adapter, over several devices, compiled. Always as the
model's own generate, and the user's model is never touched."""

import copy
import importlib.util

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from lasd.decoding.attention import StepRows
from lasd.decoding.decoder import Decoder
from lasd.decoding.loading import load_target
from lasd.decoding.rows import verify_rows
from lasd.decoding.sampling import SamplingParams
from lasd.decoding.target import TargetModel
from lasd.decoding.tree import DraftTree, TreeShape, batch_trees
from lasd.decoding.view import model_view
from lasd.errors import LasdError
from tests.drafters_under_test import TREE, Scripted, medusa
from tests.evaluation.tiny import save_model
from tests.families import tiny_model

PROMPT = [5, 9, 33, 4, 17, 8, 21]
NEW_TOKENS = 20
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, eos_token_ids=())

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is missing")
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def own_answer(model) -> list[int]:
    """What the model's own generate says."""
    ids = torch.tensor([PROMPT])
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)[0, len(PROMPT) :].tolist()


def answers_of(target: TargetModel, own: list[int]) -> dict[str, list[int]]:
    """Plain decoding, trees that are right, trees that are wrong, and random Medusa heads."""
    known = {tuple(PROMPT): own}
    drafters = {
        "plain": None,
        "right": Scripted(known, target.vocab_size, TREE, right=True, device=target.device),
        "wrong": Scripted(known, target.vocab_size, TREE, right=False, device=target.device),
        "medusa": medusa(target, known),
    }
    return {name: Decoder(target, drafter).generate([PROMPT], GREEDY)[0].tokens for name, drafter in drafters.items()}


def assert_decodes_exactly(target: TargetModel, own: list[int]) -> None:
    assert len(set(own)) >= 5, "an answer of few tokens tests little"
    assert answers_of(target, own) == dict.fromkeys(("plain", "right", "wrong", "medusa"), own)


def fresh(family: str = "llama") -> torch.nn.Module:
    """A model of its own, which a test may change."""
    return copy.deepcopy(tiny_model(family))


# Half precision: logits, not tokens, because rounding may depend on the number of rows


def tree_logits(target: TargetModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a prompt's last token and of a tree behind it, with those of the model's own forward."""
    shape = TreeShape([-1, 0, 0, 1, 2])
    tree = DraftTree(shape, torch.tensor([11, 12, 13, 14, 15]))
    cache = target.new_cache(1, 16)
    ids = torch.tensor([PROMPT])
    last, _ = target.forward(StepRows(ids, torch.arange(len(PROMPT))[None]), cache, torch.tensor([len(PROMPT) - 1]))
    cache.advance(0, [len(PROMPT)])
    nodes, _ = target.forward(verify_rows(batch_trees([tree], target.device), [tree], cache.lengths), cache)
    texts = torch.tensor([PROMPT + [int(tree.tokens_N[node]) for node in shape.ancestry(leaf)] for leaf in (3, 4)])
    with torch.no_grad():
        own = target.model(input_ids=texts, use_cache=False).logits[:, len(PROMPT) - 1 :]
    return torch.cat([last[0], nodes[0]]), own[[0, 0, 0, 1, 0, 1], [0, 1, 2, 2, 3, 3]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.06), (torch.float16, 0.01), (torch.float32, 1e-4)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_logits_of_a_tree_step_are_the_models_own_in_every_precision(family, dtype, tolerance):
    ours, own = tree_logits(TargetModel(fresh(family).to(dtype)))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), own.float(), atol=tolerance * float(own.float().std()), rtol=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_dtype_that_was_asked_for_is_loaded(folder, dtype):
    target = load_target(folder, dtype=dtype, device="cpu")
    assert str(target.dtype) == {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[dtype]


# bitsandbytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A llama whose layers are large enough for blocks of 64 weights."""
    folder = save_model(tmp_path_factory.mktemp("target"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=257, num_hidden_layers=2, tie_word_embeddings=False, initializer_range=0.3, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def without_bf16_kernel(target: TargetModel) -> TargetModel:
    """On CPUs with AVX512-BF16 bitsandbytes multiplies in bf16 whatever was asked for; here it must not."""
    for module in (*target.model.modules(), *target._view.modules()):
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return target


@needs_bitsandbytes
def test_nf4_decodes_as_its_own_generate(folder):
    target = without_bf16_kernel(load_target(folder, dtype="fp32", quantization="nf4", device="cpu"))
    assert type(target.model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert (target.quantization, target.dtype) == ("nf4", torch.float32)
    own = own_answer(target.model)
    assert_decodes_exactly(target, own)
    assert own != own_answer(load_target(folder, dtype="fp32", device="cpu").model)


@needs_bitsandbytes
def test_nf4_weights_that_are_repacked_in_a_view_still_serve_the_model(folder):
    """The first forward on a CPU repacks the weights in place, for the view and the model alike."""
    target = load_target(folder, dtype="bf16", quantization="nf4", device="cpu")
    assert target.layout
    Decoder(target).generate([PROMPT], GREEDY)
    first = own_answer(target.model)
    untouched = load_target(folder, dtype="bf16", quantization="nf4", device="cpu").model
    assert first == own_answer(untouched)


@needs_bitsandbytes
def test_int8_without_outlier_columns_decodes_as_its_own_generate(folder):
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config, device_map="cpu")
    assert_decodes_exactly(TargetModel(model), own_answer(model))


@needs_bitsandbytes
def test_int8_is_close_to_its_own_forward(folder):
    """Which columns count as outliers, and are multiplied unquantised, depends on all rows of a pass: close, not
    equal."""
    target = load_target(folder, dtype="fp32", quantization="int8", device="cpu")
    assert type(target.model.model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"
    ours, own = tree_logits(target)
    assert float((ours - own).norm() / own.norm()) < 0.1
    assert Decoder(target).generate([PROMPT], GREEDY)[0].tokens == own_answer(target.model)


# peft


def adapted(model, **changes):
    """The model with a LoRA adapter that is far from the identity."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **(settings | changes))).eval()


@needs_peft
def test_an_adapter_is_loaded_over_the_model_and_changes_its_answers(folder, tmp_path):
    adapted(LlamaForCausalLM.from_pretrained(folder)).save_pretrained(tmp_path)
    target = load_target(folder, dtype="fp32", device="cpu", adapter=str(tmp_path))
    own = own_answer(target.model)
    assert_decodes_exactly(target, own)
    assert own != own_answer(load_target(folder, dtype="fp32", device="cpu").model)


@needs_peft
@pytest.mark.parametrize("where", [{}, {"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_a_peft_model_is_decoded_with_its_adapter(where):
    peft_model = adapted(fresh(), **where)
    if "modules_to_save" in where:
        torch.nn.init.normal_(peft_model.get_base_model().lm_head.modules_to_save["default"].weight, std=0.35)
    target = TargetModel(peft_model)
    assert target.model is peft_model.get_base_model()
    own = own_answer(peft_model)
    assert_decodes_exactly(target, own)
    assert own != own_answer(tiny_model("llama"))


@needs_peft
def test_an_adapter_that_adds_tokens_is_refused():
    from peft import PrefixTuningConfig, get_peft_model

    model = get_peft_model(fresh(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(LasdError, match="adapter is of type PREFIX_TUNING, which adds tokens"):
        TargetModel(model)


def test_an_adapter_that_is_not_there_is_one_line(folder, tmp_path):
    with pytest.raises(LasdError, match=r"cannot be loaded|is neither a folder here|cannot be reached"):
        load_target(folder, device="cpu", adapter=str(tmp_path / "absent"))


# Several devices: accelerate wraps the forward of modules


@needs_accelerate
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_dispatched_model_decodes_as_before(family):
    from accelerate import dispatch_model

    model = dispatch_model(fresh(family), {"": "cpu"}, force_hooks=True)
    assert "forward" in vars(model)
    assert_decodes_exactly(TargetModel(model), own_answer(tiny_model(family)))


@needs_accelerate
def test_an_offloaded_model_decodes_on_its_execution_device():
    """Its weights are on the meta device between calls."""
    from accelerate import cpu_offload

    model = cpu_offload(fresh(), execution_device=torch.device("cpu"))
    target = TargetModel(model)
    assert model.lm_head.weight.device.type == "meta"
    assert target.device.type == "cpu"
    assert_decodes_exactly(target, own_answer(tiny_model("llama")))


@needs_accelerate
@pytest.mark.parametrize("append", [False, True])
def test_hooks_run_on_the_views_own_modules(append):
    from accelerate.hooks import ModelHook, add_hook_to_module

    seen = []

    class Recorder(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    model = fresh()
    for module in model.modules():
        add_hook_to_module(module, ModelHook() if append else Recorder())
        if append:
            add_hook_to_module(module, Recorder(), append=True)
    target = TargetModel(model)
    assert target.layout
    seen.clear()
    Decoder(target).generate([PROMPT], GREEDY)
    own_modules = set(map(id, model.modules()))
    assert len({type(module) for module in seen}) >= 6
    assert [type(module).__name__ for module in seen if id(module) in own_modules] == []
    seen.clear()
    own_answer(model)
    assert {id(module) for module in seen} <= own_modules


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_over_two_devices_decodes_as_before():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    torch.backends.cuda.matmul.allow_tf32 = False
    model = fresh()
    own = own_answer(model)
    parts = {"model.layers.1": "cuda", "model.norm": "cuda", "lm_head": "cuda", "model.layers.0": "cpu"}
    for name, device in parts.items():
        module = model.get_submodule(name).to(device)
        add_hook_to_module(
            module, AlignDevicesHook(execution_device=torch.device(device, 0 if device == "cuda" else None))
        )
    add_hook_to_module(model.model, AlignDevicesHook(execution_device=torch.device("cpu")))
    target = TargetModel(model)
    assert target.device.type == "cuda"
    assert {entry.device.type for entry in target.layout} == {"cpu", "cuda"}
    assert_decodes_exactly(target, own)


# torch.compile


def test_a_compiled_wrapper_is_decoded_as_the_model_inside():
    model = fresh()
    target = TargetModel(torch.compile(model, backend="eager"))
    assert target.model is model
    assert Decoder(target).generate([PROMPT], GREEDY)[0].tokens == own_answer(model)


def test_a_view_runs_eagerly_and_leaves_the_compiled_forward_to_the_model():
    model = fresh()
    model.compile(backend="eager")
    model.model.forward = torch.compile(model.model.forward, backend="eager")
    view = model_view(model)
    assert view._compiled_call_impl is None
    assert model._compiled_call_impl is not None
    assert view.model.forward.__self__ is view.model
    assert not hasattr(model.model.forward, "__self__")


def test_a_forward_that_cannot_be_bound_to_the_view_is_refused():
    model = fresh()
    inner = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **kwargs: inner(*args, **kwargs)
    with pytest.raises(LasdError, match=r"the forward of a LlamaDecoderLayer was replaced by .*lambda"):
        TargetModel(model)


# The user's model


def picture(model) -> tuple:
    """What must not change: the attention of each config, forwards, sub-modules, weights, and the answer."""
    return (
        {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")},
        [(name, id(module), id(vars(module).get("forward"))) for name, module in model.named_modules()],
        [(name, id(tensor), tensor._version) for name, tensor in model.named_parameters()],
        own_answer(model),
    )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_users_model_keeps_its_attention_and_modules(implementation):
    model = fresh("gemma3")
    model.set_attn_implementation(implementation)
    before = picture(model)
    target = TargetModel(model)
    Decoder(target, medusa(target, {})).generate([PROMPT], GREEDY)
    assert before[0] == {implementation}
    assert picture(model) == before


def test_the_users_model_and_the_target_survive_an_exception_inside_forward(monkeypatch):
    model = fresh()
    before = picture(model)
    target = TargetModel(model)
    decoder = Decoder(target)
    calls = []
    layer = target._view.model.layers[1]
    forward = layer.forward

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", failing)
        with pytest.raises(RuntimeError, match="out of luck"):
            decoder.generate([PROMPT], GREEDY)
    assert decoder.live_slots == []
    assert picture(model) == before
    assert decoder.generate([PROMPT], GREEDY)[0].tokens == before[-1]


def test_two_targets_of_one_model_do_not_disturb_each_other():
    model = fresh()
    first, second = TargetModel(model), TargetModel(model)
    own = own_answer(model)
    slot = Decoder(first).generate([PROMPT], GREEDY)[0].tokens
    assert slot == Decoder(second).generate([PROMPT], GREEDY)[0].tokens == own
