"""Comparing shards with the sha256 of their index, before a run trains on them."""

from collections.abc import Callable, Iterable

from lipnext_scale.data.catalog import Catalog, Shard
from lipnext_scale.errors import UserError
from lipnext_scale.files import file_sha256, file_stamp


def stamp(shard: Shard) -> str:
    assert shard.sha256 is not None
    return file_stamp(shard.path, shard.sha256)


def unchecked_shards(catalogs: Iterable[Catalog], known: frozenset[str]) -> list[Shard]:
    """The shards with an index whose stamp is not among the known ones."""
    return [
        shard
        for catalog in catalogs
        for shard in catalog.shards
        if shard.sha256 is not None and stamp(shard) not in known
    ]


def check_shards(
    shards: list[Shard], advance: Callable[[int], None] = lambda _bytes: None
) -> list[str]:
    """Hash the shards; their stamps, or an error that names the first that is damaged."""
    stamps = []
    for shard in shards:
        before = stamp(shard)
        try:
            found = file_sha256(shard.path, advance)
        except OSError as error:
            raise UserError(f"{shard.name}: cannot be read: {error.strerror}") from None
        if found != shard.sha256:
            raise UserError(
                f"{shard.name}: its sha256 is not that of its index: the shard is damaged or was "
                "exchanged; python -m data_prep.verify tells more, data.verify=false trains anyway"
            )
        stamps.append(before)
    return stamps
