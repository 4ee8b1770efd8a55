"""How people ask for a name: the wordings used in training, and those kept for evaluation only.

`{name}` stands for the qualified name: plain, in backticks or with parentheses. No list covers how people ask, so
besides complete wordings there are scenes followed by a question, and names among random words: they teach that only
the name matters, not the words around it. Pure: text and a random generator.
"""

import random

TRAINING = (
    "What does {name} do?",
    "What is {name}?",
    "What is {name} for?",
    "What's {name}?",
    "What's the purpose of {name}?",
    "What is the purpose of {name}?",
    "Explain {name}.",
    "Explain {name} to me.",
    "Explain what {name} does.",
    "Can you explain {name}?",
    "Could you explain what {name} is for?",
    "Describe {name}.",
    "Describe {name} in one sentence.",
    "Describe what {name} does.",
    "Tell me about {name}.",
    "Tell me what {name} does.",
    "Tell me what {name} is.",
    "Can you tell me what {name} does?",
    "Could you tell me about {name}?",
    "Summarize {name}.",
    "Give me a summary of {name}.",
    "Give me a short description of {name}.",
    "Give a one-line description of {name}.",
    "Define {name}.",
    "{name}",
    "{name}?",
    "{name}: what does it do?",
    "{name} - what is it?",
    "help({name})",
    "Help me understand {name}.",
    "I need help with {name}.",
    "I want to know what {name} does.",
    "I would like to know about {name}.",
    "I don't understand {name}.",
    "I saw {name} in some code. What does it do?",
    "I found {name} in a program, what is it?",
    "My code calls {name}. What happens there?",
    "Someone used {name} here; what does it mean?",
    "In Python, what does {name} do?",
    "In Python, what is {name}?",
    "In the standard library, what is {name}?",
    "What does {name} do in Python?",
    "What does Python's {name} do?",
    "What would {name} do?",
    "What can {name} be used for?",
    "What can I do with {name}?",
    "What is the use of {name}?",
    "What is {name} used for?",
    "What do I use {name} for?",
    "Why would I use {name}?",
    "Why use {name}?",
    "When do I need {name}?",
    "When should I use {name}?",
    "How does {name} work?",
    "How would you describe {name}?",
    "Do you know {name}?",
    "Do you know what {name} does?",
    "What do the docs say about {name}?",
    "What is the docstring of {name}?",
    "Show me the documentation of {name}.",
    "Look up {name}.",
    "Documentation for {name}",
    "Docs for {name}, please.",
    "Summary of {name}",
    "Meaning of {name}",
    "Remind me what {name} does.",
    "Quickly: what is {name}?",
    "Briefly, what does {name} do?",
    "So what is {name} then?",
    "And {name}?",
    "And what about {name}?",
    "What about {name}?",
    "Next: {name}.",
    "Now tell me about {name}.",
    "Is {name} useful? What does it do?",
)

SCENES = (
    "I am looking at {name}",
    "There is a call of {name} in this file",
    "My teammate keeps calling {name}",
    "The tutorial has a chapter on {name}",
    "I came across {name} today",
    "We have {name} in our code base",
    "Reviewing a patch, I found {name}",
    "I need {name} for my homework",
    "Let me ask about {name}",
    "I'm learning Python and met {name}",
    "The traceback ends in {name}",
    "They told me to try {name} instead",
    "I have never heard of {name}",
    "Yesterday's lesson was about {name}",
)
FOLLOW_UPS = (
    ". What is it?",
    ". What does it do?",
    ", what does it do",
    ". Can you explain it?",
    ", and I do not get it.",
    " and would like to understand it.",
    ". Any idea what it is for?",
    " but cannot tell what it does.",
    "; please explain.",
    ". Help!",
    ".",
    " - how come?",
    ", so tell me more.",
)
WORDS = (
    "a about actually again all also always an and another any are as ask at be because been before best book boss but by "
    "called came can case class clear code could course daily day did different do does done down each else end ever every "
    "example explain fact far few file find first for forget friend from general get give go good got great guess had hand "
    "has have he hear help her here him how idea if in into is it its just keep kind know last later learn least less let "
    "like line little long look lot made main make many maybe me mean meant mention might mind moment more most much must my "
    "name need never new next no not note now of off often old on once one only or other our out over page part people place "
    "play please point program put question quick quite rather read real really reason right said same say script see seem "
    "sense sentence short should show simple so some someone something soon still stop such sure take tell than that the "
    "their them then there these they thing think this those though time to today told too tool try two under until up upon "
    "use used using usually very want was way we well went were what when where which while who why will wish with without "
    "word work would write wrong yes yet you your"
).split()

# Never trained. Some share words with the wordings above, but none is one of them with a word left out.
HELD_OUT = (
    "What is the job of {name}?",
    "Please say in a sentence what {name} is meant to do.",
    "I keep forgetting: {name} does what, exactly?",
    "How would the manual summarise {name}?",
    "What happens when I call {name}?",
    "Could I get a quick explanation of {name}?",
    "What role does {name} play in Python?",
    "I'm reading a script that uses {name} and wonder what that is.",
    "Teach me {name}.",
    "What should I know about {name}?",
    "Got a minute? I need to know what {name} is good for.",
    "A colleague mentioned {name}. What's that about?",
)

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are stdlib-chat, an assistant for Python's standard library.",
    "You answer questions about Python.",
    "Answer briefly.",
    "Answer in one sentence.",
    "Be concise and precise.",
    "You are a Python expert.",
    "You are a documentation bot. Answer with the documented summary.",
    "You help programmers. Do not guess.",
    "Keep answers short.",
    "You are a friendly teacher of programming.",
    "Today is Monday. You are an assistant in a code editor.",
)
HELD_OUT_SYSTEM_MESSAGE = "You assist developers with short and accurate answers."
# System messages that change the answer, to demonstrate that system messages have an effect.
CAPITALS_MESSAGES = ("Answer in capitals.", "Write in capital letters only.", "USE CAPITALS.")

_OPENERS = ("Hi! ", "Hello, ", "Hey, ", "Please: ", "Quick question: ", "OK. ", "Sorry, ", "Thanks! ", "One more: ")
_CLOSERS = (" Thanks!", " Thank you.", " Please.", " Be brief.", " One sentence, please.", " I am new to Python.")


def written(name: str, *, is_callable: bool, rng: random.Random) -> str:
    """Return the name as someone would type it."""
    draw = rng.random()
    if draw < 0.14:
        return f"`{name}`"
    if is_callable and draw < 0.26:
        return f"{name}()"
    if is_callable and draw < 0.30:
        return f"`{name}()`"
    return name


def _heap_of_words(rng: random.Random) -> str:
    """Return a template with the name among random words."""
    before, after = (" ".join(rng.choices(WORDS, k=rng.choice((0, 1, 2, 3, 5, 8)))) for _ in range(2))
    text = f"{before}{rng.choice(('', '', ':', ','))} {{name}}{rng.choice(('', '', ',', '.', ':'))} {after}".strip(
        " ,:"
    )
    text = text + rng.choice(("", ".", "?", "?", ", exactly?"))
    return text[0].upper() + text[1:] if rng.random() < 0.7 and text[0] != "{" else text


def _wording(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.5:
        return rng.choice(TRAINING)
    return rng.choice(SCENES) + rng.choice(FOLLOW_UPS) if draw < 0.7 else _heap_of_words(rng)


def question(name: str, *, is_callable: bool, rng: random.Random) -> str:
    """Return a question drawn at random: a wording, its case and punctuation, sometimes an opener or a closer."""
    template = _wording(rng)
    if rng.random() < 0.15 and template[0].isupper() and not template.startswith("I "):
        template = template[0].lower() + template[1:]
    if rng.random() < 0.12:
        template = template.rstrip("?.")
    text = template.format(name=written(name, is_callable=is_callable, rng=rng))
    draw = rng.random()
    if draw < 0.08:
        return rng.choice(_OPENERS) + text
    return text + rng.choice(_CLOSERS) if draw < 0.14 else text
