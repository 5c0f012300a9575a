"""The Horovod engine, in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod")


def test_horovods_own_elastic_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses samples."""
    from trainkit.engine.horovod.engine import HorovodEngine
    from trainkit.errors import EngineError

    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(EngineError, match="trainkit horovod install"):
        HorovodEngine("cpu").__enter__()
    monkeypatch.setenv("TRAINKIT_ELASTIC_DRIVER", "horovod")
    with pytest.raises(EngineError, match=r"Leave out hvd.init\(\) before the Trainer"):
        HorovodEngine("cpu").__enter__()
