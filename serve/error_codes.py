"""What the codes of errors mean, and what to do: in the OpenAPI document, and in docs/reference/errors.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ErrorCode:
    """An ``error.code``.

    Args:
        cause: when it is answered.
        cure: what whoever has sent the request, or runs the server, can do.
    """

    cause: str
    cure: str


ERROR_CODES: Mapping[str, ErrorCode] = {
    # The request's fields.
    "unknown_parameter": ErrorCode(
        cause="the body has a field that this route does not know",
        cure="correct its name, which the message suggests where it is close to one, or leave it out; "
        "`--ignore-unknown-fields` has a server ignore such fields",
    ),
    "unsupported_parameter": ErrorCode(
        cause="the field is known, but what it asks for is not supported, or not together with another field",
        cure="leave out the field that `error.param` names; the message says why",
    ),
    "missing_required_parameter": ErrorCode(cause="a field that must be there is not", cure="send it"),
    "invalid_type": ErrorCode(
        cause="a field has a value of another type, such as a number in a string",
        cure="send the type that the message names",
    ),
    "invalid_value": ErrorCode(
        cause="a value is out of range, contradicts another, or cannot be read",
        cure="the message says what is allowed",
    ),
    "context_length_exceeded": ErrorCode(
        cause="the prompt, or the prompt and `max_tokens` together, are longer than the context",
        cure="shorten the conversation, lower `max_tokens`, send `truncate_prompt_tokens`; or serve with a larger "
        "`--max-model-len`, or with `--cut-max-tokens`",
    ),
    "model_not_found": ErrorCode(
        cause="`model` is none of the names that the server has",
        cure="send one of `/v1/models`, or nothing; `--served-model-name` says the names, `'*'` takes any; where "
        "models come and go, `/api/pull` fetches one",
    ),
    "invalid_adapter": ErrorCode(
        cause="an adapter's files cannot be read, or do not fit the model or the server's settings",
        cure="the message names the file, the tensor or the setting",
    ),
    "not_enabled": ErrorCode(
        cause="the server was started without the setting that allows it", cure="the message names the setting"
    ),
    "not_pulled": ErrorCode(
        cause="a model is to be deleted that the server's settings name",
        cure="take it out of them; `llmjax rm` removes its files",
    ),
    "model_busy": ErrorCode(
        cause="a model is to be deleted while it is pulled, or pulled while it is deleted",
        cure="ask again when the other has ended",
    ),
    "model_unavailable": ErrorCode(
        cause="of several models the one that is asked for could not be loaded, has died, or was not given memory in "
        "time, as others are in use",
        cure="ask again after `Retry-After` seconds; the server's log says why. `--model-timeout` bounds the wait, "
        "`--models-memory-bytes` the memory",
    ),
    "model_not_loaded": ErrorCode(
        cause="of several models the one that is meant is not loaded, and this does not load it",
        cure="send it a request first",
    ),
    "unsupported_task": ErrorCode(
        cause="the model does something else: it makes vectors and no text, or the other way around",
        cure="use the routes that the message names, or serve another model",
    ),
    "no_tokenizer": ErrorCode(
        cause="the server was started with `--skip-tokenizer-init`", cure="send token ids to `/v1/completions`"
    ),
    # The body.
    "invalid_json": ErrorCode(
        cause="the body is not JSON, not an object, or nested too deeply", cure="the message says where it breaks"
    ),
    "too_many_values": ErrorCode(
        cause="a list or an object of the body has too many entries", cure="send less at a time, or upload a batch"
    ),
    "invalid_form": ErrorCode(cause="an uploaded form cannot be read", cure="send `multipart/form-data` with a `file`"),
    "body_too_large": ErrorCode(
        cause="the body, decompressed, is larger than `--max-request-bytes`",
        cure="send less, or serve with a larger limit",
    ),
    "headers_too_large": ErrorCode(
        cause="the request's headers are longer than `--max-header-bytes` or more than `--max-header-count`",
        cure="send fewer headers (cookies, often), or serve with larger limits",
    ),
    "invalid_content_encoding": ErrorCode(
        cause="the body is not compressed as `Content-Encoding` says", cure="leave the header out, or compress the body"
    ),
    "unsupported_content_encoding": ErrorCode(
        cause="`Content-Encoding` is none of gzip, deflate and zstd", cure="use one of these, or none"
    ),
    "invalid_http": ErrorCode(
        cause="the bytes are not an HTTP/1.1 request, or one for a proxy",
        cure="check the address (`http` or `https`) and what stands between client and server",
    ),
    "request_timeout": ErrorCode(
        cause="408: the request did not come whole within `--read-timeout`; 504: the answer took longer than "
        "`--request-timeout`",
        cure="408: try again on a better link; 504: ask for fewer tokens, stream, or serve with a longer timeout",
    ),
    # Keys, hosts and limits.
    "invalid_api_key": ErrorCode(
        cause="the key is missing or wrong", cure="send `Authorization: Bearer KEY` or `X-Api-Key: KEY`"
    ),
    "key_needed": ErrorCode(
        cause="what changes the server for everybody needs a server with keys",
        cure="serve with `--api-key` or `--admin-key`, and send one",
    ),
    "admin_key_needed": ErrorCode(cause="only operators may do this", cure="send a key of `--admin-key`"),
    "unknown_host": ErrorCode(
        cause="the request is addressed to a host name that is not allowed, which may be DNS rebinding",
        cure="use `localhost` or an address, or serve with `--allowed-hosts NAME`",
    ),
    "unknown_origin": ErrorCode(
        cause="a page of another origin has sent the request", cure="serve with `--allowed-origins ORIGIN`"
    ),
    "rate_limit_exceeded": ErrorCode(
        cause="the key has used its requests or tokens of this minute",
        cure="try again after `Retry-After` seconds; `--max-requests-per-minute` and `--max-tokens-per-minute` are the "
        "limits",
    ),
    # The server's state.
    "queue_full": ErrorCode(
        cause="as many requests wait as may",
        cure="try again after `Retry-After` seconds; more engines, or a larger `--max-num-queued-reqs`",
    ),
    "asleep": ErrorCode(cause="the server sleeps", cure="an operator wakes it: `POST /wake_up`"),
    "shutting_down": ErrorCode(
        cause="the server ends, and takes no new requests", cure="try another server, or again when it is back"
    ),
    "aborted": ErrorCode(
        cause="an operator has ended the request, by abort, sleep or pause", cure="send it again, if it is wanted still"
    ),
    "engine_dead": ErrorCode(
        cause="the engine's process has ended; the server ends soon after",
        cure="a supervisor starts it again; its log says why it ended. `--data-parallel-size 2` keeps one alive",
    ),
    "engine_error": ErrorCode(
        cause="this request failed in the engine, as when its logits are not finite",
        cure="the log has more; `llmjax doctor --check-device` looks at the device",
    ),
    "internal_error": ErrorCode(
        cause="a fault of this program", cure="please report it, with the traceback in the server's log"
    ),
    "not_implemented": ErrorCode(
        cause="a route of vLLM's that is not here, or one for servers of another kind",
        cure="the message says why, and what to use instead",
    ),
    # What the server keeps.
    "not_found": ErrorCode(
        cause="there is no file, batch, response or conversation of this id for this key",
        cure="check the id and the key; what is kept goes after its lifetime, and most of it when the server ends",
    ),
    "conflict": ErrorCode(
        cause="another request of the same conversation is being answered", cure="wait for that answer"
    ),
    "no_room": ErrorCode(
        cause="the files of the key take as much as they may",
        cure="delete some; `--max-files-bytes` and `--max-file-bytes` are the limits",
    ),
    "storage_failed": ErrorCode(
        cause="the disk of `--files-dir` failed, or is full (507)", cure="free some space; the log has the reason"
    ),
    "empty_file": ErrorCode(cause="the file of a batch holds no requests", cure="upload one line for each request"),
    "too_many_requests": ErrorCode(cause="the file of a batch holds too many requests", cure="make several batches"),
    "too_many_batches": ErrorCode(cause="too many batches are unfinished", cure="wait for one, or cancel one"),
    "batch_ended": ErrorCode(cause="a batch that has ended cannot be canceled", cure="nothing is left to do"),
    "server_ended": ErrorCode(cause="the server ended before the batch did", cure="make the batch again"),
}
