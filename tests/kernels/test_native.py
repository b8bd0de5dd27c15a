"""C++ files beside the ops: who builds them, who gets them, and what happens where they cannot be
built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftsmith.kernels.kv_append import kv_append, kv_append_reference
from draftsmith.kernels.native import Native
from draftsmith.kernels.rotary import rotate, rotate_reference

needs_compiler = pytest.mark.skipif(
    Native("rotary", {}).library is None, reason="no C++ compiler on this machine"
)


@needs_compiler
def test_who_gets_it(choose: Callable[[str], None]):
    """`auto` and `compiled` on a CPU; integers, other devices and the other words never."""
    like = torch.empty(0)
    for word, expected in {"auto": True, "compiled": True, "reference": False}.items():
        choose(word)
        file = Native("rotary", {"rotate": []})
        assert file.serves(like) == file.serves(like.double()) == expected
        assert not file.serves(like.long()) and not file.serves(like.to("meta"))
        with FakeTensorMode():
            assert not file.serves(torch.empty(0))


def test_without_a_compiler(choose: Callable[[str], None], monkeypatch: pytest.MonkeyPatch):
    """`auto` runs the plain form, `compiled` says what to install."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    choose("auto")
    assert not Native("rotary", {"rotate": []}).serves(torch.empty(0))
    choose("compiled")
    with pytest.raises(ValueError, match="compiled: rotary.cpp cannot be built here; install g"):
        Native("rotary", {"rotate": []}).serves(torch.empty(0))


@needs_compiler
def test_a_file_that_does_not_compile_is_told_once(
    choose: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The compiler's own words reach the user, and the plain form runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choose("auto")
    file = Native("rotary", {"rotate": []})
    file.source = tmp_path / "broken.cpp"
    file.source.write_text("this is no C++")
    with pytest.warns(UserWarning, match="broken.cpp could not be built .*error"):
        assert not file.serves(torch.empty(0))
    assert not file.serves(torch.empty(0))  # and no second warning
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
def test_a_built_file_is_kept_until_its_source_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """One file for one source; another source, another file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "two.cpp"
    source.write_text('extern "C" int two() { return 2; }')
    for returned in (2, 2, 3):
        file = Native("two", {"two": []}, returns=("two",))
        file.source = source
        source.write_text(f'extern "C" int two() {{ return {returned}; }}')
        assert file.library is not None and file.library.two() == returned
    assert len(list(tmp_path.rglob("*.so"))) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rotation_equals_the_definition(dtype: torch.dtype):
    """Some heads of a wider buffer; the others stay as they are."""
    torch.manual_seed(0)
    buffer = torch.randn(7, 5, 24, dtype=torch.float64).to(dtype)
    cos, sin = (torch.randn(7, 24, dtype=torch.float64).to(dtype) for _ in range(2))
    expected = buffer.double()
    rotate_reference(expected[:, :3], cos.double(), sin.double())
    rotate(buffer[:, :3], cos, sin)
    bound = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(buffer.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_stored_where_they_belong(dtype: torch.dtype):
    """Strided rows, values of another width, a row that is not stored and may hold anything."""
    torch.manual_seed(0)
    new = torch.randn(5, 2, 40).to(dtype).transpose(0, 1)
    k, v = new[..., :24], new[..., 24:]
    slots = torch.tensor([7, -1, 0, 9, 3])
    pools = [torch.zeros(2, 10, width, dtype=dtype) for width in (24, 16)]
    expected = [pool.clone() for pool in pools]
    kv_append(pools[0], pools[1], k, v, slots)
    kv_append_reference(expected[0], expected[1], k, v, slots)
    assert all(torch.equal(a, b) for a, b in zip(pools, expected, strict=True))
