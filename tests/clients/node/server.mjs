// The server that the clients talk to: `python -m mlxsrv`, with the built-in model, as shipped.
// It runs in the server's own environment: MLXSRV_PYTHON says which.

import { spawn } from "node:child_process";
import { once } from "node:events";
import path from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const ROOT = path.resolve(path.dirname(fileURLToPath(import.meta.url)), "../../..");
const PYTHON = process.env.MLXSRV_PYTHON ?? path.join(ROOT, ".venv/bin/python");

/** Milliseconds that a server has to end after it was asked to. */
const STOP = 60_000;

/** Starts a server on a free port. Gives its URL, and what stops it. */
export async function startServer() {
  const env = Object.fromEntries(
    Object.entries(process.env).filter(([name]) => !name.startsWith("MLXSRV_")),
  );
  const command = ["-m", "mlxsrv", "--port", "0", "--log-format", "json"];
  const server = spawn(PYTHON, command, { cwd: ROOT, env, stdio: ["ignore", "ignore", "pipe"] });
  const killed = () => server.kill("SIGKILL");
  process.once("exit", killed);

  async function stop() {
    if (server.exitCode === null && server.signalCode === null) {
      const impatience = setTimeout(killed, STOP);
      server.kill("SIGTERM");
      await once(server, "exit");
      clearTimeout(impatience);
    }
    process.off("exit", killed);
  }

  return { url: await announced(server), stop };
}

/** Where the server says it listens. The rest of its log is read too, so that it never blocks. */
function announced(server) {
  return new Promise((resolve, reject) => {
    const log = [];
    server.once("error", reject);
    server.once("exit", () => reject(new Error(`the server ended:\n${log.join("\n")}`)));
    createInterface(server.stderr).on("line", (line) => {
      log.push(line);
      const said = line.startsWith("{") ? JSON.parse(line) : {};
      if (said.event === "listening") resolve(said.url);
    });
  });
}
