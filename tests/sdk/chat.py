"""One chat completion by an official SDK: chat.py openai|anthropic URL RETRIES EVENTS GATE

Prints "ready", then the text of each event as it comes. Of a retry it prints "again in" and the seconds; of an exception its
classes, status, reason, the type in the body, and on a line of its own the message in the body.
"""

import importlib
import logging
import re
import sys


class Retries(logging.Handler):
    """What the SDKs say in their logs before they wait."""

    def emit(self, record):
        wait = re.match(r"Retrying request .*?in ([0-9.]+) seconds", record.getMessage())
        if wait:
            print("again in", wait[1])


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


def classes_of(error, last):
    names = [each.__name__ for each in type(error).__mro__]
    return "<".join(names[: names.index(last) + 1])


def main():
    name, url, retries, events, gate = sys.argv[1:]
    sdk = importlib.import_module(name)
    call = {"openai": events_of_openai, "anthropic": events_of_anthropic}[name]
    logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger(name).addHandler(Retries())
    print("ready")
    try:
        for text in call(sdk, url, int(retries), {"events": events, "gate": gate}):
            print(text)
        print("end")
    except sdk.APIStatusError as error:
        reason = error.response.headers["tidegate-reason"]
        print(classes_of(error, "APIStatusError"), error.status_code, reason, error.type)
        print(error.body["message"] if name == "openai" else error.api_message)


main()
