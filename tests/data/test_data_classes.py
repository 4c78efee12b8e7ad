"""A label means the same class in every set of a run."""

import pytest
from sets_making import write_set

from lipnext_scale.config import ConfigError
from lipnext_scale.data import DataConfig, DataSets, SyntheticConfig

ANIMALS = ("cat", "dog", "eel", "fox")


def opened(tmp_path, **names: tuple[str, ...]) -> DataSets:
    """Sets whose indexes have these class names."""
    train, test, synthetic = (
        write_set(tmp_path, [8], name, classes=3, class_names=names.get(name, ()))
        for name in ("train", "test", "synthetic")
    )
    return DataSets(DataConfig(train, test, synthetic=SyntheticConfig(synthetic)), 8, 3, 10)


@pytest.mark.parametrize("other", ["test", "synthetic"])
def test_a_class_that_one_set_lacks_shifts_the_others(tmp_path, other):
    """As when a folder is missing, or a subset is drawn by another seed."""
    shifted = (ANIMALS[0], *ANIMALS[2:])
    key = "data.test" if other == "test" else "data.synthetic.shards"
    with pytest.raises(ConfigError) as error:
        opened(tmp_path, train=ANIMALS, **{other: shifted})
    assert error.value.key == key
    assert "its class 1 is 'eel', that of data.train is 'dog'; convert both" in str(error.value)


@pytest.mark.parametrize(
    "other",
    [(), ANIMALS, ANIMALS[:3], ("0", "1", "2", "3")],
    ids=["none", "same", "few", "numbers"],
)
def test_names_that_agree_or_say_nothing(tmp_path, other):
    """Numbers are what generated images come with."""
    assert len(opened(tmp_path, train=ANIMALS, test=other, synthetic=other).train) == 8
