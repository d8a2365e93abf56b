"""Ten uploads of 2 MB, each on a connection of its own: upload.py httpx|aiohttp URL

Prints "ready", then the status and the reason of each answer.
"""

import asyncio
import sys

import aiohttp
import httpx

BODY = b"x" * 2_000_000


def with_httpx(url):
    for _ in range(10):
        answer = httpx.post(url, content=BODY)
        print(answer.status_code, answer.headers["tidegate-reason"])


async def with_aiohttp(url):
    for _ in range(10):
        async with aiohttp.ClientSession() as session, session.post(url, data=BODY) as answer:
            await answer.read()
            print(answer.status, answer.headers["tidegate-reason"])


client, url = sys.argv[1:]
print("ready")
if client == "httpx":
    with_httpx(url)
else:
    asyncio.run(with_aiohttp(url))
