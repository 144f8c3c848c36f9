"""A two-turn environment of the current verifiers API, with a harness that streams its model calls."""

import re

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SampleData(vf.TaskData):
    number: int


class SampleTask(vf.Task[SampleData]):
    @vf.reward
    async def last_code(self, trace: vf.Trace) -> float:
        """The number in the model's last reply: a reward that betrays whose reply it was computed from."""
        return float(re.findall(r"code-(\d+)", trace.last_reply)[-1])

    @vf.metric
    async def num_turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SampleTaskset(vf.Taskset[SampleTask, vf.TasksetConfig]):
    def load(self):
        for number in range(8):
            yield SampleTask(SampleData(prompt=f"Task {number}: say a code.", number=number), self.config.task)


class SampleHarnessConfig(vf.HarnessConfig):
    pass


class SampleHarness(vf.Harness[SampleHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for follow_up in ("Another one.", None):
            stream = await client.chat.completions.create(model=ctx.model, messages=messages, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            messages.append({"role": "assistant", "content": text})
            if "crash" in text:
                raise RuntimeError("the harness crashed")
            if follow_up:
                messages.append({"role": "user", "content": follow_up})
        await client.close()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SampleHarness", "SampleTaskset"]
