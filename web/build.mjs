// Bundles src/ into the folder that the server reads: node build.mjs FOLDER
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const folder = process.argv[2];
if (!folder) throw new Error("node build.mjs FOLDER");
process.chdir(here);
rmSync(folder, { recursive: true, force: true });
mkdirSync(folder, { recursive: true });

const result = await build({
  entryPoints: ["src/app.tsx", "src/style.css"],
  outdir: folder,
  bundle: true,
  splitting: true, // what is loaded when it is first needed is a file of its own: highlight.js and KaTeX
  format: "esm",
  target: "es2022",
  minify: true,
  charset: "utf8",
  legalComments: "none", // they are in LICENSES.txt
  jsx: "automatic",
  jsxImportSource: "preact",
  entryNames: "[name]",
  chunkNames: "[name]",
  metafile: true,
});
for (const name of ["index.html", "icon.svg"]) cpSync(join("src", name), join(folder, name));

// The licenses of the libraries in the bundle, each in full.
const inputs = Object.keys(result.metafile.inputs).filter((path) => path.startsWith("node_modules/"));
const packages = [...new Set(inputs.map((path) => path.split("/")[1]))].sort();
const texts = packages.map((name) => {
  const root = join("node_modules", name);
  const { version, license } = JSON.parse(readFileSync(join(root, "package.json"), "utf8"));
  const file = readdirSync(root).find((file) => /^licen[cs]e/i.test(file));
  if (file === undefined) throw new Error(`${name} has no license file`);
  return `${name} ${version} (${license})\n\n${readFileSync(join(root, file), "utf8").trim()}\n`;
});
writeFileSync(join(folder, "LICENSES.txt"), texts.join(`\n${"-".repeat(80)}\n\n`));

// By this a test without Node sees that the files were made of other sources than those beside them.
const hash = createHash("sha256");
const sources = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"];
for (const entry of readdirSync("src", { recursive: true, withFileTypes: true })) {
  if (entry.isFile()) sources.push(join(entry.parentPath, entry.name));
}
for (const path of sources.sort()) hash.update(`${path}\0`).update(readFileSync(path)).update("\0");
writeFileSync(join(folder, "sources.sha256"), `${hash.digest("hex")}\n`);
if (!existsSync(join(folder, "app.js"))) throw new Error("no app.js was made");
