"""Stream a reply from a server started by examples/serve.sh."""

import sys

from openai import OpenAI


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = OpenAI(base_url=url, api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Tell me a short story about a fox."}],
        temperature=0,
        max_tokens=120,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
