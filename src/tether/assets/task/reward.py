"""What a good response is. tether calls `closeness` once for every response.

A reward is a plain function. It gets what its parameters name:

    response   the text that the model wrote
    finished   False if it was cut off at rollout.max_response_tokens
    prompt     the prompt as the row has it
    answer     a column of the data row: any other name is one

It returns a number, more for better, or None for "cannot be scored". Raise freely: a row whose
reward fails is left out and named in the run's events.jsonl, it is never counted as 0.
"""


def closeness(response: str, answer: str, finished: bool) -> float:
    """1 for the right number, less the further away it is, 0 for anything else.

    A reward can teach only if responses to the same prompt differ in it. Right or wrong would do
    here as well; a graded one also tells a near miss from a wild guess.
    """
    text = response.strip()
    if not finished or not text.isdigit():
        return 0.0
    return 1.0 / (1.0 + abs(int(text) - int(answer)))
