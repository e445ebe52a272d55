import pytest

from msl import NO_COMPILER, find_compiler


@pytest.fixture(autouse=True)
def compiler() -> None:
    if find_compiler() is None:
        pytest.skip(NO_COMPILER)
