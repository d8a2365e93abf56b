// A browser that does what it is told, one JSON object a line, and answers each with a line. Started by
// tests/integration/page.rs with the folder for its profile; playwright-core is in NODE_PATH.
"use strict";
const readline = require("node:readline");
const { chromium } = require("playwright-core");

const ARGS = [
  "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
const PATIENCE = 15_000;

async function main(profile) {
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: ARGS, viewport: { width: 1000, height: 760 },
  });
  const page = context.pages()[0] ?? await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  // What a page must not do by itself.
  const asked = new Set(), troubles = [];
  page.on("request", (request) => asked.add(new URL(request.url()).origin));
  page.on("dialog", (dialog) => { troubles.push(`dialog: ${dialog.message()}`); dialog.dismiss(); });
  page.on("pageerror", (error) => troubles.push(`error: ${error.message}`));
  page.on("console", (message) => {
    // A listener that is gone for a moment is part of the test.
    const isGone = /ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|ERR_EMPTY_RESPONSE|ERR_CONNECTION_RESET|status of 4\d\d|status of 503/.test(message.text());
    if (message.type() === "error" && !isGone) troubles.push(`console: ${message.text()}`);
  });
  const acts = {
    open: ({ url }) => page.goto(url),
    size: ({ width, height }) => page.setViewportSize({ width, height }),
    scheme: ({ scheme }) => page.emulateMedia({ colorScheme: scheme }),
    text: ({ at }) => page.locator(at).first().innerText(),
    count: ({ at }) => page.locator(at).count(),
    click: ({ at }) => page.locator(at).first().click(),
    fill: ({ at, text }) => page.locator(at).first().fill(text),
    press: ({ key }) => page.keyboard.press(key),
    type: ({ text }) => page.keyboard.type(text),
    // What has the focus, as a screen reader says it.
    focused: () => page.locator("*:focus").first().evaluate((node) => node.getAttribute("aria-label") ?? node.textContent, undefined, { timeout: 1_000 }).catch(() => ""),
    // How far it must be scrolled sideways.
    overflow: () => page.locator("html").evaluate((node) => node.scrollWidth - node.clientWidth),
    colour: ({ at }) => page.locator(at).first().evaluate((node) => getComputedStyle(node).backgroundColor),
    attribute: ({ at, name }) => page.locator(at).first().getAttribute(name),
    picture: ({ file }) => page.screenshot({ path: file }),
    top: () => page.locator("html").evaluate(() => scrollTo(0, 0)),
    title: () => page.title(),
    troubles: () => [...troubles],
    origins: () => [...asked],
  };
  console.log(JSON.stringify("ready"));
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const order = JSON.parse(line);
    try {
      console.log(JSON.stringify({ is: (await acts[order.do](order)) ?? null }));
    } catch (error) {
      console.log(JSON.stringify({ failed: `${line}: ${error.message}` }));
    }
  }
  await context.close();
}

main(process.argv[2]);
