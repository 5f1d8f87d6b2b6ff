// Runs the tests in tests/ with Node's own runner, which reads no TypeScript: node test.mjs
import { build } from "esbuild";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const folder = mkdtempSync(join(tmpdir(), "llmjax-web-"));
const files = readdirSync("tests").filter((name) => name.endsWith(".test.ts"));
await build({
  entryPoints: files.map((name) => join("tests", name)),
  outdir: folder,
  outExtension: { ".js": ".mjs" },
  bundle: true,
  format: "esm",
  platform: "node",
  target: "node20",
});
const { status } = spawnSync(process.execPath, ["--test", folder], { stdio: "inherit" });
rmSync(folder, { recursive: true });
process.exit(status ?? 1);
