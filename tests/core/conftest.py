from collections.abc import AsyncIterator

import pytest
from scripted_meshes import Runs


@pytest.fixture
async def runs(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Runs]:
    made = Runs(monkeypatch)
    yield made
    await made.close()
