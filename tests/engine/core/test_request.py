"""The engine's requests and outputs, which go through its loop."""

from __future__ import annotations

import gc
import weakref

from llmjax.engine.core.request import EngineOutput, SequenceTimes
from llmjax.errors import GenerationFailed


def test_an_output_whose_error_leads_back_to_it_is_collected() -> None:
    error = GenerationFailed("no")
    times = SequenceTimes(arrival=0.0)
    output = EngineOutput(request_id=1, index=0, times=times, new_token_ids=[], finish_reason="error", error=error)
    error.__dict__["frame"] = [output]  # as the locals of a frame in its traceback
    alive = weakref.ref(error)
    del error, output
    gc.collect()
    assert alive() is None
