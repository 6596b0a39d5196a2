"""What the models that run in this process share."""

import pytest

from models.embedded import EmbeddedModel
from models.offline import OfflineTriage
from models.scripted import ScriptedModel


@pytest.mark.parametrize("model", [OfflineTriage(), ScriptedModel(replies=[{}])], ids=lambda model: model._llm_type)
async def test_it_binds_any_tools_and_answers_on_the_loop_only(model: EmbeddedModel) -> None:
    assert model.bind_tools(["anything"]) is model
    assert (await model.ainvoke("Why?")).type == "ai"
    with pytest.raises(TypeError, match="is asynchronous: use ainvoke"):
        model.invoke("Why?")
