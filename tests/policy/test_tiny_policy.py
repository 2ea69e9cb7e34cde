"""The tiny policy: what transformers makes of it, and its cache. About 8 s, most of it importing transformers."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load_file

from titan_rl.chat import make_renderer
from titan_rl.errors import ConfigError
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.architecture import read_shape
from titan_rl.policy.models.tiny import make_tiny_policy, tiny_shape
from titan_rl.types import Message

TOOLS = ("<tool>", "</tool>", "<result>", "</result>")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def test_transformers_gives_one_token_per_symbol(cache):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_policy(TinyPolicyConfig(), cache))
    ids = tokenizer("4071=", add_special_tokens=False)["input_ids"]
    assert ids == [2 + "0123456789=".index(symbol) for symbol in "4071="]
    assert tokenizer.decode(ids) == "4071="
    assert tokenizer.eos_token_id == 1 and tokenizer.pad_token_id == 0
    assert tokenizer.decode([*ids, 1]) == "4071=<eos>"


def test_special_tokens_are_single_and_survive_decoding(cache):
    from transformers import AutoTokenizer

    config = TinyPolicyConfig(symbols="0123456789+=", special_tokens=TOOLS)
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_policy(config, cache))
    text = "1+2=<tool>1+2</tool><result>3</result>3"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [ids[4], ids[8], ids[9]] == [14, 15, 16]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_foreign_character_is_an_error_and_not_a_hole(cache):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(make_tiny_policy(TinyPolicyConfig(), cache) / "tokenizer.json"))
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("40x1=")


CHAT = TinyPolicyConfig(tokenizer="chat", max_length=512)


def test_a_chat_tokenizer_writes_any_text_one_token_per_byte(cache):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_policy(CHAT, cache))
    text = "Zieliński  =\n\t✓ <think>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.removesuffix("<think>").encode()) + 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]) == [0, 1]
    assert tiny_shape(CHAT).vocab == len(tokenizer) == 256 + 9


def test_a_chat_tokenizer_renders_a_prompt_as_its_template_does(cache):
    from transformers import AutoTokenizer

    directory = make_tiny_policy(CHAT, cache)
    messages = [Message("system", "Be brief."), Message("user", "é?")]
    ids = make_renderer("auto", directory, {"enable_thinking": False}).render(messages)
    plain = [{"role": message.role, "content": message.content} for message in messages]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(plain, add_generation_prompt=True, enable_thinking=False, tokenize=False)
    assert tokenizer.decode(ids) == text
    with pytest.raises(Exception, match="shows no tools"):
        tokenizer.apply_chat_template(plain, tools=[{"name": "add"}], tokenize=False)


@pytest.mark.parametrize(("architecture", "tied"), [("qwen3", True), ("qwen3", False), ("llama3", True)])
def test_transformers_loads_every_weight(cache, architecture, tied):
    from transformers import AutoModelForCausalLM

    directory = make_tiny_policy(TinyPolicyConfig(architecture=architecture, tied_embeddings=tied), cache)
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) == (
        {"qwen3": 124_160, "llama3": 124_032}[architecture] + (0 if tied else 13 * 64)
    )
    rope = {"rope_theta": 1e4, "rope_type": {"qwen3": "default", "llama3": "llama3"}[architecture]}
    assert rope.items() <= model.config.rope_parameters.items()
    assert model.generation_config.eos_token_id == 1
    stored = load_file(directory / "model.safetensors")
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), stored[name])


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "llama3"])
def test_its_own_config_is_read_back(cache, architecture):
    config = TinyPolicyConfig(architecture=architecture, layers=3, tied_embeddings=False)
    assert read_shape(make_tiny_policy(config, cache)) == tiny_shape(config)


def test_matrices_are_normal_and_norms_are_one(cache):
    weights = load_file(make_tiny_policy(TinyPolicyConfig(), cache) / "model.safetensors")
    matrices = np.concatenate([data.ravel() for data in weights.values() if data.ndim == 2])
    assert matrices.std() == pytest.approx(0.02, rel=0.02)
    assert abs(matrices.mean()) < 2e-4
    assert all((data == 1).all() for data in weights.values() if data.ndim == 1)


def test_the_same_config_is_the_same_directory_and_another_is_another(cache):
    first = make_tiny_policy(TinyPolicyConfig(), cache)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert make_tiny_policy(TinyPolicyConfig(), cache) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert make_tiny_policy(TinyPolicyConfig(seed=1), cache) != first
    assert first.name == "tiny-88e8eb4d2eeb456d", "the name before there were other architectures"


def test_many_at_once_make_one_directory(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_tiny_policy(TinyPolicyConfig(), tmp_path), range(16)))
    assert len(set(made)) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == [made[0].name]
    assert len(load_file(made[0] / "model.safetensors")) == 24


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "titan_rl.policy.models.tiny.save_file", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        make_tiny_policy(TinyPolicyConfig(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_default_cache_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert make_tiny_policy(TinyPolicyConfig()).parent == tmp_path / "titan_rl"


def test_making_one_imports_no_torch(tmp_path):
    program = (
        "import sys; from pathlib import Path; from titan_rl.policy.models.tiny import make_tiny_policy\n"
        "from titan_rl.policy.config import TinyPolicyConfig\n"
        f"make_tiny_policy(TinyPolicyConfig(), Path({str(tmp_path)!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"symbols": "0120"}, "twice: 0"),
        ({"special_tokens": ("<eos>",)}, "<eos>"),
        ({"symbols": ""}, "symbols"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"head_dim": 31}, "head_dim"),
        ({"architecture": "gemma"}, "'gemma' names nothing: expected one of llama3, qwen3, qwen3_moe"),
    ],
)
def test_a_config_that_makes_no_policy_is_refused(tmp_path, change, word):
    with pytest.raises(ConfigError, match=word):
        make_tiny_policy(TinyPolicyConfig(**change), tmp_path)
    assert not list(tmp_path.iterdir())
