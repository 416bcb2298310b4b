"""`jaxcoll generate`: continue prompts of unequal length greedily, all in one batch."""

from __future__ import annotations

import json
from collections.abc import Sequence

from models.deepseek_v4 import report
from models.deepseek_v4.config import Config
from models.deepseek_v4.decoder import Decoder, Row
from models.deepseek_v4.requests import Home
from models.deepseek_v4.session import open_session
from models.errors import UserError
from models.options import GenerateOptions
from models.progress import Working


def run(options: GenerateOptions) -> int:
    """Runs the command. Raises UserError for a prompt that the model or the cache cannot take."""
    config = Config.from_folder(options.checkpoint_dir)
    check_prompts(options.prompt_ids, config.vocab_size)
    longest = max(map(len, options.prompt_ids)) + options.max_new_tokens - 1
    with Working() as working:
        session = open_session(
            options.checkpoint_dir,
            config,
            options,
            working,
            requests=len(options.prompt_ids),
            positions=longest,
            what="the longest prompt with its new tokens",
            settings=options.paths.settings(),
        )
        stop = () if options.ignore_eos else _stop_ids(config)
        generated = generate(session.decoder, options.prompt_ids, session.homes, options.max_new_tokens, stop, working)
    report.print_notes(session.notes)
    if options.json:
        print(json.dumps({"generated": generated}))
    else:
        for ids in generated:
            print(",".join(map(str, ids)))
    return 0


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    homes: Sequence[Home],
    max_new_tokens: int,
    stop: Sequence[int] = (),
    working: Working | None = None,
) -> list[list[int]]:
    """Feeds each prompt token by token and then its own greedy continuation, every request at its own position.

    Args:
        decoder: with a slot for every home.
        prompts: token ids, none empty.
        homes: replica and slot of each prompt.
        max_new_tokens: per prompt.
        stop: ids that end a request; they are part of its output.
        working: told how far it is.

    Returns:
        New ids per prompt, in prompt order.
    """
    room = [sum(home[0] == r for home in homes) for r in range(decoder.topology.attn_dp)]
    new: list[list[int]] = [[] for _ in prompts]
    fed = [0] * len(prompts)
    steps, most = 0, max(map(len, prompts)) + max_new_tokens - 1
    going = list(range(len(prompts)))
    while going:
        text = {i: (prompts[i][fed[i]] if fed[i] < len(prompts[i]) else new[i][-1]) for i in going}
        following = decoder.next_tokens([Row(text[i], fed[i], *homes[i]) for i in going], room)
        steps += 1
        if working:
            working.decoded(steps, most)
        for i, token in zip(going, following, strict=True):
            fed[i] += 1
            if fed[i] >= len(prompts[i]):
                new[i].append(token)
        going = [i for i in going if len(new[i]) < max_new_tokens and not (new[i] and new[i][-1] in stop)]
    return new


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raises UserError for an empty prompt or a token id that the vocabulary does not have."""
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UserError(f"prompt {number} is empty; it must hold at least one token id")
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise UserError(
                    f"token id {token} of prompt {number} is out of range: it must be from 0 to {vocab_size - 1} "
                    f"(vocab_size={vocab_size})"
                )


def _stop_ids(config: Config) -> tuple[int, ...]:
    end = config.eos_token_id
    return end if isinstance(end, tuple) else () if end is None else (end,)
