// Read a mapstate state on one Redis server from Node, as of a whole batch. It needs no package.
//
//     node examples/read_state.mjs redis://localhost:6379/0 visits_by_user user-42 user-7
//
// It prints a JSON object with the fields of each key, or null if the key is absent. Without keys, each line of the
// standard input is a JSON list of keys, and each is answered by a line. Keys are given as the store has them:
// docs/guides/other-languages.md.

import net from "node:net";
import readline from "node:readline";

// The rule: which of a record's values counts.

function counts(ledger, txid) {
  const isDead = ledger.dead.some(([first, last]) => first <= txid && txid <= last);
  return ledger.last_txid !== null && txid <= ledger.last_txid && !isDead;
}

function fieldsOf(ledger, record) {
  if (record === null) return null; // the key is absent
  if (ledger.type === "non-transactional") return named(ledger, ledger.next_txid, record);
  const [txid, value, before] = record;
  if (txid < ledger.floor) return null; // the state was reset since
  if (txid < ledger.first_txid) throw new Error("the records are older than their ledger");
  if (txid >= ledger.next_txid) throw new Error("a record is newer than its ledger");
  return named(ledger, txid, ledger.type === "transactional" || counts(ledger, txid) ? value : before);
}

function named(ledger, txid, value) {
  if (value === null) return null; // the key was removed, or has not been there
  const [, count] = ledger.layouts.findLast(([first]) => first <= txid) ?? ledger.layouts[0];
  const isBare = count === 1 && !(Array.isArray(value) && value.length === 1 && value[0] === null);
  const values = isBare ? [value] : value;
  return Object.fromEntries(ledger.fields.map(([name], at) => [name, values[at] ?? null]));
}

// JSON.parse rounds integers above 2^53: those of 16 digits and more become strings.
function parsed(text) {
  const long = /"(?:[^"\\]|\\.)*"|(?<![\w.+-])-?\d{16,}(?![\d.eE])/g;
  return text === null ? null : JSON.parse(text.replace(long, (part) => (part[0] === '"' ? part : `"${part}"`)));
}

// One MGET reads the ledger and the records at one moment, so no batch comes in between.
async function read(redis, prefix, state, keys) {
  const names = [`${prefix}${state}!ledger`, ...keys.map((key) => `${prefix}${state}:${key}`)];
  const [ledger, ...records] = (await redis.command("MGET", ...names)).map(parsed);
  if (ledger === null) throw new Error(`there is no state ${state}`);
  if (ledger.format !== 1 || ledger.serializer !== "json") throw new Error("this program reads JSON of format 1");
  return Object.fromEntries(keys.map((key, at) => [key, fieldsOf(ledger, records[at])]));
}

// A client of a few lines, so that this file runs anywhere. A service takes the package `redis` or `ioredis`.
class Redis {
  constructor(url) {
    this.waiting = [];
    this.unread = Buffer.alloc(0);
    this.socket = net.connect(Number(url.port || 6379), url.hostname);
    this.socket.on("data", (data) => this.#received(data));
    this.socket.on("error", (error) => this.#failed(error));
    this.socket.on("close", () => this.#failed(new Error("Redis closed the connection")));
  }

  command(...words) {
    const parts = words.map((word) => `$${Buffer.byteLength(word)}\r\n${word}\r\n`);
    this.socket.write(`*${words.length}\r\n${parts.join("")}`);
    return new Promise((resolve, reject) => this.waiting.push({ resolve, reject }));
  }

  #received(data) {
    this.unread = Buffer.concat([this.unread, data]);
    for (let reply; this.waiting.length && (reply = this.#reply(0)) !== undefined; ) {
      this.unread = this.unread.subarray(reply.end);
      const { resolve, reject } = this.waiting.shift();
      reply.value instanceof Error ? reject(reply.value) : resolve(reply.value);
    }
  }

  #reply(start) {
    const lineEnd = this.unread.indexOf("\r\n", start);
    if (lineEnd < 0) return undefined; // the rest has still to come
    const kind = String.fromCharCode(this.unread[start]);
    const line = this.unread.toString("utf8", start + 1, lineEnd);
    let end = lineEnd + 2;
    if (kind === "-") return { value: new Error(line), end };
    if (kind === "+" || kind === ":") return { value: line, end };
    const size = Number(line);
    if (size < 0) return { value: null, end };
    if (kind === "$") {
      if (this.unread.length < end + size + 2) return undefined;
      return { value: this.unread.toString("utf8", end, end + size), end: end + size + 2 };
    }
    const value = [];
    for (let at = 0; at < size; at++) {
      const part = this.#reply(end);
      if (part === undefined) return undefined;
      value.push(part.value);
      end = part.end;
    }
    return { value, end };
  }

  #failed(error) {
    for (const { reject } of this.waiting.splice(0)) reject(error);
  }

  close() {
    this.socket.destroy();
  }
}

async function main([address, state, ...keys]) {
  const url = new URL(address);
  const redis = new Redis(url);
  const login = [url.username, url.password].filter(Boolean).map(decodeURIComponent);
  if (login.length) await redis.command("AUTH", ...login);
  if (url.pathname.length > 1) await redis.command("SELECT", url.pathname.slice(1));
  const prefix = url.searchParams.get("prefix") ?? "";
  const show = async (some) => console.log(JSON.stringify(await read(redis, prefix, state, some)));
  if (keys.length) await show(keys);
  else for await (const line of readline.createInterface({ input: process.stdin })) await show(JSON.parse(line));
  redis.close();
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error.message);
  process.exit(1);
});
