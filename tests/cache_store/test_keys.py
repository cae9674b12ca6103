from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache_store.keys import chunk_key, digest_fields, key_space, tokens_digest


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_no_two_field_lists_collide(a: list[bytes], b: list[bytes]) -> None:
    assert (digest_fields(*a) == digest_fields(*b)) == (a == b)


def test_keys_are_stable_across_processes_and_releases() -> None:
    """A changed value loses every stored entry of every installation: change it on purpose only."""
    space = key_space("fingerprint", (1, 2, 3), "default", "raw")
    assert chunk_key(space, tokens_digest((4, 5))) == "4597e0f2e3bd8e2707462684df56859778579e75e0a347b394fb645fcec138ef"


def test_every_part_is_in_the_key() -> None:
    spaces = [("f", (1,), "t", "raw"), ("g", (1,), "t", "raw"), ("f", (2,), "t", "raw"), ("f", (1,), "u", "raw")]
    keys = {chunk_key(key_space(*space), tokens_digest(ids)) for space in spaces for ids in ((1,), (1, 2))}
    assert len(keys) == 8
