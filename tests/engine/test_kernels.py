"""The GPU kernels against dense fp64: on a CUDA device if there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_store.base import ChunkKV
from cache_store.codec import CODECS, Packed, Shape
from engine.attention import QueryRows, attend
from engine.forward import ForwardPass
from engine.kernels import cuda
from engine.kernels.attend import attend_rows
from engine.kernels.column_sums import column_sums
from engine.kernels.decode import decode
from engine.kernels.flex import attend_rows_flex, block_mask
from engine.kernels.graph import DecodeGraph
from engine.kernels.paged import decode_paged, decode_reference
from engine.kernels.place import place
from engine.model import Model, token_tensor
from engine.placing import place_on_gpu, place_plain
from tests.tiny import FAMILIES, Bench, plain_module, run

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALING = 0.3
# Largest error relative to the norm of the reference. Operands in half precision carry it; the interpreter also cuts
# off where a GPU rounds.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def drawn(rows: int, slots: int, seed: int = 0) -> Tensor:
    """Positions of scattered rows, sorted."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(slots, generator=generator)[:rows].sort().values.to(DEVICE)


def slot_views(kv_heads: int, slots: int, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """K and V as a model sees them: one layer of three."""
    layer = normal(3, 2, kv_heads, slots, head_dim, dtype=dtype, seed=1)[1]
    return layer[0][None], layer[1][None]


def queries(heads: int, rows: int, head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """As they come from a projection: [1, rows, heads, head_dim] in memory."""
    return normal(1, rows, heads, head_dim, dtype=dtype, seed=2).transpose(1, 2)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and weights, in fp64."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(group, 1) for part in (key, value))
    logits = query.double() @ key.transpose(-1, -2) * SCALING
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    slots = torch.arange(key.shape[2], device=key.device)
    hidden = slots > positions[:, None]
    if window is not None:
        hidden |= slots <= positions[:, None] - window
    logits = logits.masked_fill(hidden, float("-inf"))
    weights = logits.softmax(-1)
    return weights @ value, logits.logsumexp(-1), weights


def error(found: Tensor, expected: Tensor) -> float:
    """NaN anywhere is an error without bound."""
    difference = (found.double() - expected).norm() / expected.norm()
    return float(difference.nan_to_num(nan=float("inf")))


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1, device=DEVICE).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    beyond = int(positions[-1]) + 1
    key[:, :, beyond:] = value[:, :, beyond:] = float("nan")  # nobody has written there yet
    with poisoned():
        out, lse = attend_rows(query, key, value, positions, SCALING, window, softcap, splits=splits)
    key, value = key[:, :, :beyond], value[:, :, :beyond]
    expected, expected_lse, _ = dense(query, key, value, positions, window, softcap)
    assert out.dtype == query.dtype
    assert out.shape == query.shape
    assert error(out, expected) < BOUNDS[query.dtype]
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    return out, lse


@pytest.mark.parametrize("group", range(1, 9))
def test_attend_rows_packs_every_group(group: int) -> None:
    key, value = slot_views(2, 70, 16)
    rows = 2 * (32 // group) + 1  # one more than two blocks of an fp32 tile
    check_attend(queries(2 * group, rows, 16), key, value, drawn(min(rows, 65), 70)[:rows])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_attend_rows_takes_every_width_and_dtype(head_dim: int, dtype: torch.dtype) -> None:
    key, value = slot_views(1, 150, head_dim, dtype)
    check_attend(queries(5, 30, head_dim, dtype), key, value, drawn(30, 150))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 17])
def test_attend_rows_at_the_borders_of_a_block(rows: int) -> None:
    key, value = slot_views(1, 90, 16)
    check_attend(queries(4, rows, 16), key, value, drawn(rows, 90))


@pytest.mark.parametrize(
    "positions",
    [[0], [63], [31], [32], [0, 63], [30, 31, 32, 33], [31, 32, 63], list(range(64)), list(range(0, 64, 9)), [62, 63]],
    ids=str,
)
def test_attend_rows_wherever_they_stand(positions: list[int]) -> None:
    key, value = slot_views(1, 64, 16)
    check_attend(queries(2, len(positions), 16), key, value, torch.tensor(positions, device=DEVICE))


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_attend_rows_merges_splits(splits: int) -> None:
    """Some splits see nothing: all of them for early rows, the last ones for every row."""
    key, value = slot_views(1, 100, 32)
    positions = torch.tensor([0, 31, 40, 99], device=DEVICE)
    out, lse = check_attend(queries(3, 4, 32), key.clone(), value.clone(), positions, splits=splits)
    whole, whole_lse = attend_rows(queries(3, 4, 32), key, value, positions, SCALING, splits=1)
    torch.testing.assert_close(out, whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, whole_lse, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [1, 10, 64, 200])
@pytest.mark.parametrize("positions", [[0, 1, 9, 10, 40, 63, 64, 100, 149], [120, 121, 127, 149]], ids=str)
def test_attend_rows_within_a_window(positions: list[int], window: int, splits: int) -> None:
    key, value = slot_views(1, 150, 16)
    at = torch.tensor(positions, device=DEVICE)
    check_attend(queries(2, len(positions), 16), key, value, at, window, splits=splits)


@pytest.mark.parametrize("window", [None, 20])
def test_attend_rows_caps_logits(window: int | None) -> None:
    key, value = slot_views(1, 70, 64)
    check_attend(queries(2, 15, 64), key, value, drawn(15, 70), window, softcap=1.5)


def test_attend_rows_equals_the_cpu_path() -> None:
    key, value = slot_views(2, 80, 32)
    query, positions = queries(6, 20, 32), drawn(20, 80)
    out, lse = attend_rows(query, key, value, positions, SCALING)
    rows = QueryRows(positions.cpu(), torch.device("cpu"), torch.float32)
    expected, expected_lse = attend(query.cpu(), key.cpu(), value.cpu(), rows, SCALING)
    torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.cpu(), expected_lse, atol=1e-5, rtol=1e-5)


def test_a_row_sees_its_own_slot_and_none_behind_it() -> None:
    key, value = slot_views(1, 60, 16)
    query, positions = queries(2, 3, 16), torch.tensor([20, 33, 59], device=DEVICE)
    before, _ = attend_rows(query, key, value, positions, SCALING)
    for row, position in enumerate((20, 33)):
        for slot, seen in ((position + 1, False), (position, True)):
            changed_key, changed_value = key.clone(), value.clone()
            changed_key[:, :, slot] += 1.0
            changed_value[:, :, slot] += 1.0
            after, _ = attend_rows(query, changed_key, changed_value, positions, SCALING)
            assert torch.equal(after[:, :, row], before[:, :, row]) is not seen
            assert not torch.equal(after[:, :, row + 1], before[:, :, row + 1])


def check_column_sums(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    keys: int,
    window: int | None = None,
    softcap: float | None = None,
    scoring: slice = slice(None),
) -> None:
    _, lse, weights = dense(query, key, key, positions, window, softcap)
    kv_heads = key.shape[1]
    expected = weights[0, :, scoring, :keys].reshape(kv_heads, -1, keys).sum(1)
    key[:, :, keys:] = float("nan")
    rows = query[:, :, scoring], key, lse.float()[:, :, scoring], positions[scoring]
    sums, again = (torch.full((kv_heads, keys), 2.0, device=DEVICE) for _ in range(2))
    column_sums(*rows, SCALING, sums, window, softcap)
    assert error(sums - 2.0, expected) < 1e-4  # nothing is rounded to half precision on the way
    column_sums(*rows, SCALING, again, window, softcap)
    assert torch.equal(sums, again)


@pytest.mark.parametrize(("group", "head_dim"), [(5, 16), (1, 80)])
def test_column_sums_of_a_question(group: int, head_dim: int) -> None:
    """Its rows stand behind those of glue and see every key that counts."""
    key, _ = slot_views(2, 60, head_dim)
    positions = torch.arange(45, 57, device=DEVICE)
    check_column_sums(queries(2 * group, 12, head_dim), key, positions, 45, scoring=slice(3, 12))


def test_column_sums_in_bfloat16() -> None:
    key, _ = slot_views(1, 70, 128, torch.bfloat16)
    check_column_sums(queries(7, 11, 128, torch.bfloat16), key, torch.arange(59, 70, device=DEVICE), 59)


@pytest.mark.parametrize("window", [None, 1, 30])
@pytest.mark.parametrize(
    "positions", [torch.arange(100), torch.arange(60, 100), drawn(40, 100).cpu()], ids=["all", "run", "scattered"]
)
def test_column_sums_of_rows_that_see_part_of_the_keys(positions: Tensor, window: int | None) -> None:
    key, _ = slot_views(1, 100, 16)
    keys = int(positions[-1]) + 1
    check_column_sums(queries(3, len(positions), 16), key, positions.to(DEVICE), keys, window, softcap=2.0)


def turned(keys: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Half-split RoPE in fp64 by the angles of fp32, as models take them."""
    angle = (positions[:, None].float() * inv_freq).double()
    half = inv_freq.shape[0]
    low, high, rest = torch.split(keys.double(), [half, half, keys.shape[-1] - 2 * half], dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("head_dim", "half"), [(16, 8), (80, 40), (96, 16)], ids=["plain", "odd width", "partial"])
def test_place(head_dim: int, half: int, codec: str) -> None:
    shape = Shape(kv_heads=2, tokens=45, head_dim=head_dim)
    stored = CODECS[codec].encode(normal(2, *shape, seed=3) * 8)
    key, value = CODECS[codec].decode(stored, shape, torch.float32)
    positions = drawn(45, 5000, seed=7)
    inv_freq = 10000.0 ** -(torch.arange(half, device=DEVICE) / half)
    slots = torch.full((3, 2, 2, 5000, head_dim), 7.0, device=DEVICE)[1]
    place(CODECS[codec].unpack(stored, shape, torch.float32), positions, inv_freq, slots[0], slots[1])
    assert error(slots[0][:, positions], turned(key, positions, inv_freq)) < 1e-6
    assert error(slots[1][:, positions], value.double()) < 1e-6
    others = torch.ones(5000, dtype=torch.bool, device=DEVICE)
    others[positions] = False
    assert (slots[:, :, others] == 7.0).all()


def test_place_rounds_to_the_slots_dtype_once() -> None:
    key, value = (normal(1, 5, 16, dtype=torch.bfloat16, seed=seed) for seed in (3, 4))
    positions, inv_freq = torch.arange(5, device=DEVICE), torch.full((8,), 0.5, device=DEVICE)
    slots = torch.empty(2, 1, 5, 16, dtype=torch.bfloat16, device=DEVICE)
    place(Packed(key, value), positions, inv_freq, slots[0], slots[1])
    assert error(slots[0], turned(key, positions, inv_freq)) < BOUNDS[torch.bfloat16]
    assert torch.equal(slots[1], value)


def test_place_takes_every_float8_for_what_it_is() -> None:
    stored = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 16, 16).view(torch.float8_e4m3fn)
    ones = torch.ones(1, 16, device=DEVICE)
    slots = torch.empty(2, 1, 16, 16, device=DEVICE)
    place(Packed(stored, stored, ones, ones), torch.arange(16, device=DEVICE), ones[0, :8] * 0, slots[0], slots[1])
    torch.testing.assert_close(slots[1], stored.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "positions",
    [drawn(1, 700), drawn(128, 700), drawn(129, 700), drawn(300, 700), *(torch.arange(at, 700) for at in (126, 127))],
    ids=["1", "128", "129", "300", "from 126", "from 127"],
)
def test_flex_block_mask_is_what_the_positions_say(positions: Tensor) -> None:
    rows, keys, positions = len(positions), 700, positions.to(DEVICE)
    mask = block_mask(positions, keys)
    visible = torch.zeros(-(-rows // 128) * 128, 768, dtype=torch.bool, device=DEVICE)
    visible[:rows, :keys] = torch.arange(keys, device=DEVICE) <= positions[:, None]
    visible[rows:] = visible[rows - 1]
    blocks = visible.view(-1, 128, 6, 128).transpose(1, 2).flatten(2)
    full, any_visible = blocks.all(2), blocks.any(2)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    for block in range(blocks.shape[0]):
        found = mask.full_kv_indices[0, 0, block, : mask.full_kv_num_blocks[0, 0, block]]
        assert found.tolist() == full[block].nonzero().flatten().tolist()
        found = mask.kv_indices[0, 0, block, : mask.kv_num_blocks[0, 0, block]]
        assert found.tolist() == (any_visible & ~full)[block].nonzero().flatten().tolist()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_is_a_second_source() -> None:
    key, value = slot_views(2, 400, 16)
    query, positions = queries(10, 150, 16), drawn(150, 400)
    out, lse = attend_rows_flex(query, key, value, block_mask(positions, 400), SCALING)
    expected, expected_lse, _ = dense(query, key, value, positions)
    assert error(out, expected) < BOUNDS[torch.float32]
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


Paged = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def paged(lengths: list[int], page: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Paged:
    """Arguments of decode_paged: pages in no order, the first page of the last two requests shared, NaN behind ends."""
    most = -(-max(lengths) // page)
    table = torch.randperm(len(lengths) * most, generator=torch.Generator().manual_seed(8)).view(len(lengths), most)
    table[-1, 0] = table[-2, 0]
    pages = normal(2, len(lengths) * most, page, kv_heads, head_dim, dtype=dtype, seed=9)
    for row, length in zip(table, lengths, strict=True):
        if length % page and row[length // page] != table[-2, 0]:
            pages[:, row[length // page], length % page :] = float("nan")
    query = normal(len(lengths), heads, head_dim, dtype=dtype, seed=10)
    counts = torch.tensor(lengths, dtype=torch.int32)
    return query, pages[0], pages[1], table.int().to(DEVICE), counts.to(DEVICE)


def dense_paged(query: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    outputs = []
    for row, own, length in zip(query, table, lengths.tolist(), strict=True):
        key, value = (pages[own].flatten(0, 1)[:length].transpose(0, 1)[None] for pages in (key_pages, value_pages))
        last = torch.tensor([length - 1], device=query.device)
        outputs.append(dense(row[None, :, None], key, value, last)[0][0, :, 0])
    return torch.stack(outputs)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("heads", "dtype"), [(10, torch.float32), (2, torch.bfloat16)], ids=["group 5", "bfloat16"])
def test_paged_decode(heads: int, dtype: torch.dtype, splits: int) -> None:
    arguments = paged([1, 16, 17, 48, 40], page=16, heads=heads, kv_heads=2, head_dim=80, dtype=dtype)
    expected = dense_paged(*arguments)
    assert error(decode_reference(*arguments, SCALING), expected) < BOUNDS[dtype]
    with poisoned():
        out = decode(*arguments, SCALING, splits=splits)
    assert error(out, expected) < BOUNDS[dtype]


def test_paged_decode_runs_without_a_gpu() -> None:
    on_device = paged([5, 9], page=8, heads=2, kv_heads=1, head_dim=16, dtype=torch.float32)
    query, keys, values, table, lengths = (part.cpu() for part in on_device)
    out = decode_paged(query, keys, values, table, lengths, SCALING)
    assert error(out, dense_paged(query, keys, values, table, lengths)) < BOUNDS[torch.float32]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model attends as it would on a GPU."""

    def sums_by_kernel(query: Tensor, key: Tensor, lse: Tensor, rows: QueryRows, *options: Any) -> None:
        column_sums(query, key, lse, rows.positions, *options)

    monkeypatch.setattr("engine.forward.attend", cuda.attend)
    monkeypatch.setattr("engine.forward.add_column_sums", sums_by_kernel)


def small_bench(family: str = "qwen2", device: torch.device = DEVICE) -> Bench:
    module = plain_module(FAMILIES[family], "prophetkv").to(device)
    return Bench(Model(module, tokenizer=None, fingerprint="tiny"), lengths=(40, 1), prefix=5, glue=1, suffix=7)


@pytest.mark.parametrize(("family", "strategy"), [("qwen2", "prophetkv"), ("gemma2", "kvshare")])
def test_a_prefill_by_kernels(request: pytest.FixtureRequest, family: str, strategy: str) -> None:
    expected = small_bench(family, torch.device("cpu")).logits(strategy)
    request.getfixturevalue("kernels")
    torch.testing.assert_close(small_bench(family).logits(strategy).cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_placed_by_kernel(codec: str) -> None:
    model = small_bench().model
    kv = ChunkKV.pack([torch.randn(2, *Shape(model.layout.kv_heads, 21, model.layout.head_dim))] * 3, codec)
    positions = torch.arange(7, 28)
    expected = torch.zeros(2, model.layout.kv_heads, 40, model.layout.head_dim)
    found = expected.to(DEVICE)
    cos, sin = (part.cpu() for part in model.angles(positions)[model.kind(1)])
    place_plain(kv, 1, cos, sin, *expected[:, :, 7:28])
    place_on_gpu(kv, 1, positions.to(DEVICE), model.frequencies(1), *found)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("kernels")
def test_decode_steps_from_fixed_buffers() -> None:
    bench = small_bench()
    prefill = bench.prefill("full")
    run(prefill.start(torch.arange(len(prefill.layout))).finish())
    check_decode(bench.model, prefill.slots.data, len(prefill.layout))


def check_decode(model: Model, filled: Tensor, start: int) -> None:
    """Three steps of a DecodeGraph against those of the layer loop."""
    plain, graphed = model.new_slots(filled.shape[3]), model.new_slots(filled.shape[3])
    plain.data.copy_(filled)
    graphed.data.copy_(filled)
    graph = DecodeGraph(model, graphed)
    for position, token in enumerate((5, 6, 7), start):
        step = ForwardPass(model, token_tensor([token]), torch.tensor([position]), plain)
        expected = run(step.finish())
        torch.testing.assert_close(graph(token, position), expected, atol=1e-4, rtol=1e-4)


def test_every_kernel_compiles_for_a_hopper_gpu() -> None:
    """The interpreter takes what the compiler refuses. No GPU is needed to compile."""
    command = ["env", "-u", "TRITON_INTERPRET", sys.executable, "-m", "tests.engine.compile_kernels"]
    made = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    names = {kernel["kernel"] for kernel in made}
    assert names == {f"_{name}_kernel" for name in ("attend", "column_sums", "decode", "merge", "place")}
    assert all(kernel["machine_code"] > 0 for kernel in made)
    assert all(kernel["shared"] <= 227 * 1024 for kernel in made), made


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 40], ids=["Llama-3.1-8B", "Qwen2.5-14B"])
def test_kernels_at_size(heads: int) -> None:
    key, value = slot_views(8, 4096, 128, torch.bfloat16)
    query, positions = queries(heads, 900, 128, torch.bfloat16), drawn(900, 4000)
    _, lse = check_attend(query, key, value, positions)
    visible = int(positions[0]) + 1
    sums = torch.zeros(8, visible, device=DEVICE)
    column_sums(query, key, lse, positions, SCALING, sums)
    _, _, weights = dense(query, key[:, :, :4000].nan_to_num(), value[:, :, :4000].nan_to_num(), positions)
    assert error(sums, weights[0, ..., :visible].reshape(8, -1, visible).sum(1)) < 1e-3
    key, value = key.nan_to_num(), value.nan_to_num()
    out, _ = attend_rows_flex(query, key, value, block_mask(positions, 4096), SCALING)
    assert error(out, dense(query, key, value, positions)[0]) < BOUNDS[torch.bfloat16]


@pytest.mark.gpu
def test_a_causal_prefill_takes_flash_attention() -> None:
    key, value = slot_views(2, 700, 128, torch.bfloat16)
    query, rows = queries(10, 600, 128, torch.bfloat16), QueryRows(torch.arange(600), DEVICE, torch.bfloat16)
    out, lse = cuda.attend(query, key, value, rows, SCALING)
    expected, expected_lse, _ = dense(query, key, value, rows.positions)
    assert error(out, expected) < BOUNDS[torch.bfloat16]
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
def test_paged_decode_on_a_gpu() -> None:
    arguments = paged([1, 3000, 257, 256], page=256, heads=40, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    assert error(decode_paged(*arguments, SCALING), dense_paged(*arguments)) < BOUNDS[torch.bfloat16]


@pytest.mark.gpu
def test_decode_graph() -> None:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 100}
    model = Model.random("llama", shape, DEVICE, torch.float32)
    slots = model.new_slots(600)
    run(ForwardPass(model, torch.arange(500) % 100, torch.arange(500), slots).finish())
    check_decode(model, slots.data, 500)
