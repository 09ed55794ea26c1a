"""Judges for tests: tiny models whose weights write the verdict, and an endpoint in the OpenAI format before one."""

import base64
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from PIL import Image

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support import tiny

allow_cpu_only()  # before transformers imports torchvision


def text_model(folder, words=(), positions=512, std=0.3):
    """A random Qwen3 with sharp logits, saved in ``folder``."""
    return str(
        tiny.language_model(
            folder,
            sharp=std,
            words=words,
            max_position_embeddings=positions,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
        )
    )


def save(model, tok, folder):
    model.eval().save_pretrained(folder)
    tok.save_pretrained(folder)
    return str(folder)


def taught(folder, answers, steps=150, within=0.05):
    """A Qwen3 that has learned by heart to answer the questions of ``answers``, ``(question, answer)`` each.

    One that comes with several answers is answered with each as often. ``within``: the loss that must be reached.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text_model(folder, std=0.05)
    model, tok = AutoModelForCausalLM.from_pretrained(folder).train(), AutoTokenizer.from_pretrained(folder)
    rows = []
    for question, answer in answers:
        asked = tok(ask_text(tok, question), add_special_tokens=False).input_ids
        said = tok(answer + "<|im_end|>", add_special_tokens=False).input_ids
        rows.append((asked, said))
    length = max(len(a) + len(s) for a, s in rows)
    ids = torch.tensor([[tok.pad_token_id] * (length - len(a) - len(s)) + a + s for a, s in rows])
    labels = torch.tensor([[-100] * (length - len(s)) + s for _, s in rows])
    mask = torch.tensor([[0] * (length - len(a) - len(s)) + [1] * (len(a) + len(s)) for a, s in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        if loss.item() < 5e-3:
            break
    assert loss.item() < within, loss.item()
    return save(model, tok, folder)


def ask_text(tok, question):
    message = [{"role": "user", "content": question}]
    return tok.apply_chat_template(message, tokenize=False, add_generation_prompt=True)


class Served(ThreadingHTTPServer):
    """An endpoint that a model's weights answer. ``requests``: the bodies that came; ``before``: a function of the
    handler and the body that may answer in its place (and then returns true)."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder=None, before=None, key=None, log_probs=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.before, self.key, self.log_probs = before, key, log_probs
        self.requests, self.most, self.now, self.lock = [], 0, 0, threading.Lock()
        self.model = self.tok = None
        if folder is not None:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
            self.tok = AutoTokenizer.from_pretrained(folder)
        self.turn = threading.Lock()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        pass

    @torch.no_grad()
    def complete(self, body):
        text = ""
        for message in body["messages"]:
            content = message["content"]
            flat = content if isinstance(content, str) else "".join(c.get("text", "<image>") for c in content)
            text += f"<|im_start|>{message['role']}\n{flat}<|im_end|>\n"
        ids = self.tok(text + "<|im_start|>assistant\n", return_tensors="pt", add_special_tokens=False).input_ids
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        out, first = [], None
        for _ in range(body["max_tokens"]):
            logits = self.model(ids).logits[0, -1].float()
            log_probs = torch.log_softmax(logits, -1)
            first = log_probs if first is None else first
            temperature = body.get("temperature", 1.0)
            if temperature == 0:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
            if token == self.tok.eos_token_id:
                break
            out.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], -1)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.tok.decode(out)},
            "finish_reason": "length" if len(out) == body["max_tokens"] else "stop",
            "logprobs": None,
        }
        if body.get("logprobs") and self.log_probs:
            values, index = first.topk(body["top_logprobs"])
            top = [
                {"token": self.tok.decode([i]), "logprob": v}
                for v, i in zip(values.tolist(), index.tolist(), strict=True)
            ]
            choice["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
        return {"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": len(out)}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.server.before is not None and self.server.before(self, None):
            return
        if self.path == "/v1/models":
            self.say(200, json.dumps({"object": "list", "data": [{"id": "tiny"}]}))
        else:
            self.say(404, "{}")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append(body)
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                self.say(401, json.dumps({"error": {"message": "wrong key"}}))
            elif server.before is None or not server.before(self, body):
                with server.turn:
                    answer = server.complete(body)
                self.say(200, json.dumps(answer))
        finally:
            with server.lock:
                server.now -= 1

    def say(self, status, text, kind="application/json", **headers):
        data = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def picture_of(body):
    """The pictures in a request's messages, decoded."""
    found = []
    for message in body["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part["type"] == "image_url":
                head, _, data = part["image_url"]["url"].partition(",")
                assert head == "data:image/png;base64"
                found.append(Image.open(io.BytesIO(base64.b64decode(data))))
    return found


def hang(handler, body):
    """Accept a question and say nothing."""
    if body is not None:
        time.sleep(5)
        return True
    return False
