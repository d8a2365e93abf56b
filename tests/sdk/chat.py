"""One chat completion by an official SDK: chat.py openai|anthropic URL RETRIES EVENTS GATE

Prints "ready", then the text of each event as it comes, or the exception's class, status and reason.
"""

import importlib
import sys


def events_of_openai(openai, url, retries, query):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=retries)
    stream = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "count"}],
        stream=True,
        extra_query=query,
    )
    for chunk in stream:
        yield chunk.choices[0].delta.content


def events_of_anthropic(anthropic, url, retries, query):
    client = anthropic.Anthropic(base_url=url, api_key="key", max_retries=retries)
    stream = client.messages.create(
        model="m",
        max_tokens=10,
        messages=[{"role": "user", "content": "count"}],
        stream=True,
        extra_query=query,
    )
    for event in stream:
        if event.type == "content_block_delta":
            yield event.delta.text


def main():
    name, url, retries, events, gate = sys.argv[1:]
    sdk = importlib.import_module(name)
    call = {"openai": events_of_openai, "anthropic": events_of_anthropic}[name]
    print("ready")
    try:
        for text in call(sdk, url, int(retries), {"events": events, "gate": gate}):
            print(text)
        print("end")
    except sdk.APIStatusError as error:
        print(type(error).__name__, error.status_code, error.response.headers["tidegate-reason"])


main()
