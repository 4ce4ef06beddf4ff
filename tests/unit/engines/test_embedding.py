"""Embeddings: a folder of sentence-transformers in this process, and an endpoint."""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from memagent.engines.local.embedding import open_embedder, unit
from memagent.engines.openai import open_endpoint_at, parse_embeddings
from memagent.errors import ConfigError, EngineRefused
from memagent.eval.methods import MethodSettings, embedder_for
from memagent.eval.records import read_items
from memagent.eval.setup import evaluate, stored_request
from memagent.eval.suites import Suite
from tests.hostile.endpoints import hostile

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "box", "code", "query", "quiet", "harbour", ":")
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random encoder that reads eight tokens at once."""
    path = tmp_path_factory.mktemp("embedder")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(path)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    BertModel(config).save_pretrained(path)
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_TOKENS}))
    return path


def copied(folder: Path, target: Path, **files: Any) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    for name, value in files.items():
        path = target / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
    return target


def embed(folder: Path, *texts: str, is_query: bool = False) -> list[list[float]]:
    return asyncio.run(open_embedder(str(folder)).embed(texts, is_query=is_query))


def states(folder: Path, *ids: int) -> torch.Tensor:
    """The encoder's own states of a text, [CLS] and [SEP] included."""
    model = BertModel.from_pretrained(folder)
    with torch.inference_mode():
        return model(torch.tensor([[2, *ids, 3]])).last_hidden_state[0]


# --- in this process ------------------------------------------------------------------------------


def test_a_vector_is_the_mean_of_the_states_whatever_else_is_in_the_batch(folder: Path) -> None:
    found = embed(folder, "red box", "code", "quiet harbour red box code", "")
    expected = unit(states(folder, 4, 5).mean(0).tolist())
    assert found[0] == pytest.approx(expected, abs=1e-5)
    assert found[1] == pytest.approx(unit(states(folder, 6).mean(0).tolist()), abs=1e-5)
    assert [sum(value * value for value in vector) for vector in found] == pytest.approx([1.0] * 4)
    assert embed(folder) == []


def test_a_text_longer_than_the_encoder_reads_is_not_cut_off(folder: Path) -> None:
    room = MAX_TOKENS - 2
    ids = [4] * room + [5, 6]
    [found] = embed(folder, " ".join(["red"] * room + ["box", "code"]))
    parts = [unit(states(folder, *part).mean(0).tolist()) for part in (ids[:room], ids[room:])]
    both = [a * MAX_TOKENS + b * 4 for a, b in zip(*parts, strict=True)]
    assert found == pytest.approx(unit(both), abs=1e-5)


def test_pooling_by_the_first_token_and_prompts_are_taken_from_the_folder(
    folder: Path, tmp_path: Path
) -> None:
    other = copied(
        folder,
        tmp_path / "first",
        **{
            "1_Pooling__config": {
                "pooling_mode_cls_token": True,
                "pooling_mode_mean_tokens": False,
            },
            "config_sentence_transformers": {"prompts": {"query": "query: ", "document": ""}},
        },
    )
    [passage] = embed(other, "red box")
    assert passage == pytest.approx(unit(states(folder, 4, 5)[0].tolist()), abs=1e-5)
    [question] = embed(other, "red box", is_query=True)
    assert question == pytest.approx(unit(states(folder, 7, 10, 4, 5)[0].tolist()), abs=1e-5)


def test_a_folder_that_cannot_be_used_is_an_error_of_one_line(folder: Path, tmp_path: Path) -> None:
    by_max = {"1_Pooling__config": {"pooling_mode_max_tokens": True}}
    with pytest.raises(ConfigError, match="pools by pooling_mode_max_tokens; only the mean"):
        open_embedder(str(copied(folder, tmp_path / "max", **by_max)))
    broken = copied(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="is no embedding model"):
        open_embedder(str(broken))
    (broken / "sentence_bert_config.json").write_text("[")
    (tmp_path / "empty").mkdir()
    for name in (broken, tmp_path / "empty"):
        with pytest.raises(ConfigError) as error:
            open_embedder(str(name))
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="there is no embedder 'nothing-like-it' on this machine"):
        open_embedder("nothing-like-it")
    with pytest.raises(ConfigError, match="runs in this process"):
        open_embedder(str(folder), base_url="http://localhost:1/v1")


# --- endpoints ------------------------------------------------------------------------------------


def reply(value: Any, status: str = "200 OK") -> list[bytes]:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return [head.encode() + b"\r\nConnection: close\r\n\r\n" + body]


def vectors_for(request: bytes) -> list[bytes]:
    """Vectors in the wrong order, with their numbers; one per text."""
    texts = json.loads(request.partition(b"\r\n\r\n")[2])["input"]
    entries = [{"index": i, "embedding": [len(text), 0]} for i, text in enumerate(texts)]
    return reply({"data": entries[::-1]})


async def test_an_endpoint_embeds_in_batches_and_keeps_the_order() -> None:
    async with hostile(vectors_for) as server:
        embedder = open_embedder("openai:some-embedder", base_url=server.base_url)
        found = await embedder.embed(["x" * number for number in range(1, 131)])
        await embedder.aclose()
    assert found == [[1.0, 0.0]] * 130
    bodies = [json.loads(one.partition(b"\r\n\r\n")[2]) for one in server.requests]
    assert sorted(len(body["input"]) for body in bodies) == [2, 64, 64]
    assert {body["model"] for body in bodies} == {"some-embedder"}
    assert all(one.startswith(b"POST /v1/embeddings ") for one in server.requests)


async def test_an_address_of_embeddings_that_a_suite_names_gets_its_own_key_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEMAGENT_API_KEY", "mine")
    for is_users in (False, True):
        async with hostile(vectors_for) as server:
            address = server.base_url if is_users else "http://users/v1"
            embedder = embedder_for(
                "dense",
                MethodSettings(embedder="openai:e", embedder_url=server.base_url),
                open_endpoint_at("m", base_url=address, api_key="users"),
            )
            assert embedder is not None
            await embedder.embed(["x"])
            await embedder.aclose()
        key = b"users" if is_users else b"none"
        assert b"authorization: Bearer " + key in server.requests[0]


async def test_an_endpoint_that_fails_once_is_asked_again_and_one_that_refuses_is_not() -> None:
    replies: Iterable[list[bytes]] = iter([reply({}, "500 Oh"), reply({"data": 7})])

    def flaky(request: bytes) -> list[bytes]:
        return next(iter(replies), None) or vectors_for(request)

    async with hostile(flaky) as server:
        embedder = open_embedder("openai:some-embedder", base_url=server.base_url)
        assert await embedder.embed(["x"]) == [[1.0, 0.0]]
        assert len(server.requests) == 3
        await embedder.aclose()
    async with hostile(lambda _: reply({"error": {"message": "no"}}, "400 Bad")) as server:
        embedder = open_embedder("openai:some-embedder", base_url=server.base_url)
        with pytest.raises(EngineRefused, match="refused the request"):
            await embedder.embed(["x"])
        assert len(server.requests) == 1
        await embedder.aclose()


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"data": {}},
        {"data": [{"embedding": [1.0]}]},
        {"data": [{"embedding": [1.0]}, {"embedding": [1.0, 2.0]}]},
        {"data": [{"embedding": [1.0]}, {"embedding": ["x"]}]},
        {"data": [{"embedding": [1.0]}, {"embedding": [float("nan")]}]},
        {"data": [{"embedding": [1.0]}, {"embedding": []}]},
        {"data": [{"embedding": [1.0]}, 4]},
        {"data": [{"embedding": [1.0], "index": 0}, {"embedding": [1.0], "index": 0}]},
        {"data": [{"embedding": [True]}, {"embedding": [1]}]},
    ],
)
def test_a_reply_that_holds_no_embeddings_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="embedding"):
        parse_embeddings(data, num=2)


# --- in an evaluation -----------------------------------------------------------------------------


def dense_suite(url: str) -> Suite:
    settings = {"embedder": "openai:some-embedder", "embedder_url": url}
    return Suite.parse(
        {
            "tasks": [{"tasks": ["beyond/two_hop"], "tokens": [2048]}],
            "methods": [{"name": "dense", "settings": settings}, {"name": "bm25"}],
            "num": 2,
            "length_tokenizer": "bytes",
        }
    )


async def test_a_suite_reads_with_embeddings_of_an_endpoint_that_is_trusted_only_if_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hostile(vectors_for) as server:
        records = await evaluate(dense_suite(server.base_url), "scripted", run_dir=tmp_path / "run")
        assert server.requests
    dense = [record for record in records if record.method == "dense"]
    assert [record.status for record in dense] == ["ok", "ok"]
    assert all(record.metadata["method"]["num_passages"] > 1 for record in dense)
    stored_request(tmp_path / "run")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    with pytest.raises(ConfigError, match="for embeddings, which you have not named"):
        stored_request(tmp_path / "run")


async def test_embeddings_that_fail_stop_the_run_and_no_item_is_recorded(tmp_path: Path) -> None:
    refuse = reply({"error": {"message": "no"}}, "400 Bad")
    async with hostile(lambda _: refuse) as server:
        with pytest.raises(EngineRefused):
            await evaluate(
                dense_suite(server.base_url).model_copy(
                    update={"methods": dense_suite(server.base_url).methods[:1]}
                ),
                "scripted",
                run_dir=tmp_path / "run",
            )
    assert not (tmp_path / "run").exists() or not list(read_items(tmp_path / "run"))
