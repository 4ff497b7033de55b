"""vLLM's OpenAI-compatible endpoint as a Ray Serve deployment, with EAGLE-3 drafts.

    python examples/ray_serve.py --replicas 2 -- --max-model-len 2048
    python examples/client.py

Everything behind `--` goes to vLLM, as behind `vllm serve MODEL`. Each replica is an
engine of its own, and Ray Serve spreads the requests. `RAY_ADDRESS` names a running
cluster; without it Ray starts one on this machine.
"""

import argparse
import json
import signal
from typing import Any

from ray import serve

from vllm_eagle3 import embedded


@serve.deployment
@serve.ingress()
class OpenAIServer:
    """One replica: vLLM's engine, and vLLM's own application in front of it."""

    async def __init__(self, command_line: list[str]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(command_line)
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs.from_cli_args(arguments)
        )
        tasks = await self.engine.get_supported_tasks()
        self.vllm_app = build_app(arguments, tasks, self.engine.model_config)
        await init_app_state(self.engine, self.vllm_app.state, arguments, tasks)

    def __serve_build_asgi_app__(self) -> Any:
        return self.vllm_app

    async def check_health(self) -> None:
        """Ray Serve replaces a replica whose engine has died."""
        await self.engine.check_health()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("vllm", nargs="*", help="arguments of vllm serve, behind --")
    arguments = parser.parse_args()
    speculation = {
        "method": "eagle3",
        "model": str(embedded.resolve_head(arguments.head)),
        "num_speculative_tokens": arguments.nodes,
    }
    command_line = ["--model", str(embedded.resolve_target(arguments.target))]
    command_line += ["--served-model-name", arguments.target]
    command_line += ["--speculative-config", json.dumps(speculation), *arguments.vllm]
    serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
    replicas = OpenAIServer.options(
        num_replicas=arguments.replicas, ray_actor_options={"num_cpus": 1}
    )
    serve.run(replicas.bind(command_line))
    print(f"serving on http://127.0.0.1:{arguments.port}/v1", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    serve.shutdown()


if __name__ == "__main__":
    main()
