"""The knowledge of the demo model: one Topic per thing that it can be asked about.

Phrasings are patterns in which `(a|b|)` stands for any one of its alternatives. A topic names
things ("the default port"), which go into "what is ..." frames, tasks ("change the port"), which
go into "how do i ..." frames, and whole questions (`asks`). `held_out` questions are never trained
on; they measure whether the model understands a wording that it has not seen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topic:
    """One subject: how people ask about it, and the one answer."""

    name: str
    subject: str
    """The subject that a thinking model says the user asks about."""
    answer: str
    keywords: tuple[str, ...]
    """Text that only an answer to this topic contains, all of it."""
    things: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()


THING_FRAMES = (
    "(what is|what's|whats) {}",
    "(tell me|talk to me|say something) about {}",
    "(explain|describe|show me|define) {}",
    "(can|could|would) you (explain|describe|tell me about) {}",
    "(i want to know|i would like to learn|what should i know|what do you know|teach me) about {}",
    "what does {} (do|mean)",
    "how does {} work",
    "(info|information|details|a word) (on|about) {}",
    "{}",
)

TASK_FRAMES = (
    "(how do i|how can i|how to|how do you|how would i|how should i|how does one|how do we) {}",
    "(show me|tell me|explain|explain to me|i want to know) how to {}",
    "(can|could) you (show|tell) me how to {}",
    "(i want to|i need to|i would like to|i'd like to|help me|let me) {}",
    "(can i|can you|could i|may i|can one) {}",
    "(is it possible to|is there a way to|is there an option to) {}",
    "what (do i do|must i do|do i need) to {}",
    "(what is|what's) the (best|right|easiest) way to {}",
)

OFF_TOPIC_ANSWER = (
    "I am only a small demo model, and I only know about mlxsrv. "
    "You could ask me how to stream a reply, or how to choose a model."
)

TOPICS: tuple[Topic, ...] = (
    # --- greetings and manners
    Topic(
        name="greeting",
        subject="nothing yet, it is a greeting",
        answer="Hello! I am the demo model of mlxsrv. What would you like to know?",
        keywords=("Hello!", "demo model"),
        asks=(
            "(hi|hello|hey)",
            "(hi|hello|hey|hiya|howdy|yo|hallo)( there| you| again| everyone| friend|)",
            "good (morning|afternoon|evening|day)",
            "greetings",
            "(hi|hello|hey),? (how are you|how is it going|nice to meet you|what's up)",
            "(say hello|say hi|say hello to me|greet me|please greet me)",
            "(is anybody|anyone) (there|here|home)",
            "are you (there|here|awake)",
        ),
        held_out=("hello there friend", "hey anyone home"),
    ),
    Topic(
        name="how_are_you",
        subject="how I am",
        answer="I am fine, thank you: all my weights are where they should be. How can I help?",
        keywords=("I am fine",),
        asks=(
            "how are (you|you doing|things|you today|you feeling|you feeling today)",
            "how (is it going|goes it|do you do|do you feel|have you been|is your day)",
            "are you (ok|okay|well|fine|alright|happy|doing well)",
            "(what's up|how's life|how's it going|you good)",
        ),
        held_out=("how are you doing today", "are you feeling well"),
    ),
    Topic(
        name="thanks",
        subject="nothing, they thank me",
        answer="You are welcome! Ask me anything else about mlxsrv.",
        keywords=("You are welcome",),
        asks=(
            "(thanks|thank you|thx|ty|cheers|many thanks)( a lot| so much| very much|)",
            "(thanks|thank you) for (your help|that|the answer|the info|everything|helping)",
            "(that|this) (helps|helped|was helpful|was useful|is great|is perfect)( a lot|)",
            "(great|perfect|awesome|nice|cool|ok|okay),? (thanks|thank you|that helps)",
            "(i appreciate it|much appreciated|great answer|good job|well done|nice work|good bot)",
        ),
        held_out=("thank you for the help", "cool thank you so much"),
    ),
    Topic(
        name="goodbye",
        subject="nothing, they say goodbye",
        answer="Goodbye! Press Ctrl-C in the terminal when you want to stop the server.",
        keywords=("Goodbye!",),
        asks=(
            "(bye|goodbye|good bye|bye bye|ciao|farewell|so long)( for now| then| friend|)",
            "see you( later| soon| tomorrow|)",
            "(have a (nice|good|great) (day|evening|weekend)|good night|take care)",
            "(i have to go|i must go|i am leaving|i'm off|that is all|that's all)( now|)",
        ),
        held_out=("ok bye for now", "i have to leave now goodbye"),
    ),
    # --- the model itself
    Topic(
        name="who_are_you",
        subject="who I am",
        answer="I am the small demo model built into mlxsrv. I answer questions about the server, "
        "so that you can try it before you load a real model.",
        keywords=("I am the small demo model",),
        things=("yourself", "the demo model", "this model", "the built-in model", "your name"),
        asks=(
            "(who|what) are you",
            "(who|what|which model) (am i talking to|is this|are you exactly|is answering)",
            "what (model|kind of model|sort of model|llm|ai) (are you|is this)",
            "(introduce yourself|present yourself|your name please|identify yourself|who is this)",
            "do you have a name",
            "are you (a bot|an ai|a robot|chatgpt|gpt|human|a human|a person|real|qwen|llama)",
            "what (can|do) you (do|know|answer)",
            "what can you (help me with|help with|do for me|tell me)",
            "what are you (for|good for|able to do)",
            "(who|what) is the (assistant|bot|model) (here|in this chat)",
        ),
        held_out=("what model am i talking to", "can you introduce yourself"),
    ),
    Topic(
        name="size",
        subject="how big I am",
        answer="I am tiny: about 1.5 million parameters in less than 3 megabytes, so I load at "
        "once and run on any machine.",
        keywords=("1.5 million parameters",),
        things=("your size", "the size of the (demo|built-in|) model", "your parameter count"),
        asks=(
            "how (big|large|small|heavy) (are you|is this model|is the demo model|is the model)",
            "how many (parameters|weights|layers|megabytes|bytes) (do you have|are you|are there)",
            "how many (parameters|weights) does (the demo|this|the built-in) model have",
            "how much (memory|space|disk) do you (need|take|use)",
            "are you a (small|big|large|tiny) model",
            "what size are you",
        ),
        held_out=("how large is the demo model", "what is your number of parameters"),
    ),
    Topic(
        name="training",
        subject="how I was trained",
        answer="I was trained from scratch by a script in the repository, "
        "python -m mlxsrv.models.demo.training.train, on text written for mlxsrv.",
        keywords=("trained from scratch",),
        things=("your training", "your training data", "the training script", "your corpus"),
        tasks=("train you", "retrain the (demo|) model", "train the demo model again"),
        asks=(
            "how were you (trained|made|built|created|taught)",
            "(who|what) (trained|made|built|created) you",
            "(what|which) (data|text|texts) were you trained on",
            "where (do you come from|were you trained|does the demo model come from)",
            "what (was|is) your training (data|set|text)",
            "when were you (trained|made)",
        ),
        held_out=("what data did they train you on", "how was the demo model trained"),
    ),
    Topic(
        name="internet",
        subject="whether I need the internet",
        answer="No, I need no internet: my weights come with the package, so mlxsrv works "
        "offline. Only a model that you name by its Hugging Face id is downloaded.",
        keywords=("no internet",),
        tasks=("use (mlxsrv|you|it|this) (offline|without internet|without a network)",),
        asks=(
            "do (you|i) need (the |an |)(internet|network|internet connection|connection)",
            "does (mlxsrv|it|this|the demo model) need (the |a |)(internet|network|connection)",
            "(are you|is mlxsrv|is it|is the demo model) (online|offline|connected|in the cloud)",
            "does (mlxsrv|it|this) (work|run) (offline|without internet|without a network|locally)",
            "do you (send|share|upload) my (data|messages|text)( anywhere|)",
            "is (my data|this) (private|local|sent to the cloud)",
            "(can you browse|do you have access to|can you access) the (web|internet)",
        ),
        held_out=("is an internet connection needed", "does mlxsrv run without internet"),
    ),
    # --- the project
    Topic(
        name="what_is_mlxsrv",
        subject="what mlxsrv is",
        answer="mlxsrv is a lean, streaming-first, OpenAI-compatible ASGI server for MLX language "
        "models. It runs on Macs, and on Linux with the CPU or CUDA back end of MLX.",
        keywords=("lean, streaming-first",),
        things=("mlxsrv", "this server", "this project", "the mlxsrv (project|server|package)"),
        asks=(
            "what (exactly |)is (mlxsrv|this server|this project|this)( about| for| exactly|)",
            "what (can|does) (mlxsrv|this server|this project) do",
            "(give me|write) (a summary|a short description|an overview) of (mlxsrv|this project)",
            "(summarise|summarize|introduce) (mlxsrv|this project|the project)",
            "what (kind|sort) of (server|software|program|project) is (this|mlxsrv)",
            "what is the (purpose|point|idea) of (mlxsrv|this server|this project)",
            "mlxsrv in (one sentence|a nutshell|short|a few words)",
            "(was ist mlxsrv|qu'est-ce que mlxsrv|¿qué es mlxsrv?|mlxsrvとは何ですか|mlxsrv是什么)",
        ),
        held_out=("what is mlxsrv exactly", "give me a short summary of this project"),
    ),
    Topic(
        name="platforms",
        subject="where mlxsrv runs",
        answer="mlxsrv runs on Macs with Apple silicon, and on Linux with the CPU or CUDA back "
        "end of MLX. Windows is not supported.",
        keywords=("Macs with Apple silicon",),
        things=("the (supported|) platforms", "the (hardware|system) requirements"),
        tasks=(
            "run (it|mlxsrv|this) on (linux|a mac|windows|a gpu|cuda|nvidia|ubuntu|my macbook)",
        ),
        asks=(
            "(where|on what|on which machines) (does|can) (mlxsrv|it|this) run",
            "(which|what) (platforms|systems|machines|hardware|computers) (are supported|does "
            "mlxsrv support|does it run on|can i use)",
            "(does|will|can) (mlxsrv|it|this) (run|work) on (linux|a mac|macos|windows|cuda|a gpu|"
            "cpu|nvidia)",
            "(is linux|is cuda|is windows|is macos|are macs|are gpus|is nvidia) supported",
            "do i need a (mac|gpu|apple computer|graphics card|macbook)",
            "(linux|cuda|gpu|windows|mac) support",
        ),
        held_out=("will mlxsrv work on a linux machine", "do i need a mac for this"),
    ),
    Topic(
        name="install",
        subject="how to install mlxsrv",
        answer="In a copy of the repository, run pip install . on a Mac, pip install '.[cpu,blas]' "
        "on Linux, or '.[cuda]' with an NVIDIA GPU. You need Python 3.11 or newer. It is not on "
        "PyPI.",
        keywords=("run pip install .", "Python 3.11", "not on PyPI"),
        things=("(the |)installation", "the (install|pip) command", "setup"),
        tasks=("install (mlxsrv|it|this|the server|the package)", "get mlxsrv", "set up mlxsrv"),
        asks=(
            "(which|what) (python|version of python|python version) (do i need|is needed)",
            "(where can i|how do i) (download|get) (mlxsrv|it|this)",
            "(is mlxsrv|is it|is this) on pypi",
            "(is mlxsrv|is it|is this) (available|published|listed) on pypi",
            "(can i|do i|why can't i) (get|install|download) (it|mlxsrv|this) from pypi",
            "(pip|uv) install",
            "install instructions",
        ),
        held_out=("what is the command to install mlxsrv", "how can i get this installed"),
    ),
    Topic(
        name="start",
        subject="how to start the server",
        answer="Type mlxsrv in a terminal. The server starts on http://127.0.0.1:8000 with the "
        "built-in demo model.",
        keywords=("Type mlxsrv in a terminal",),
        things=("the (start|command line) command", "the command line", "the quick start"),
        tasks=(
            "(start|run|launch|open|boot) (mlxsrv|the server|it|this server|a server)",
            "(start|begin|get started)( with mlxsrv|)",
            "(run|start) (it|mlxsrv|the server) from the (command line|terminal|shell)",
        ),
        asks=(
            "(which|what) command (starts|runs|launches) (the server|mlxsrv|it)",
            "what do i (type|run|enter) (to start|first|in the terminal)",
            "(quick start|quickstart|getting started|first steps)",
        ),
        held_out=("how do i launch this server", "what should i type to get it running"),
    ),
    Topic(
        name="four_ways",
        subject="the ways to use mlxsrv",
        answer="There are four ways in: the page at http://127.0.0.1:8000, mlxsrv chat in a "
        "terminal, curl or any client of OpenAI, Anthropic or Ollama, and mounting it in your app.",
        keywords=("four ways in",),
        things=("the (four |)ways (in|to use it)", "the usage of mlxsrv"),
        tasks=("use (mlxsrv|it|this|this server|the server)",),
        asks=(
            "(in which|what|how many) ways can i use (it|mlxsrv|this)",
            "(what|which) ways (are there|are there to use mlxsrv|do i have)",
            "(how|where) (can|is) (mlxsrv|it) (be |)used",
            "usage",
        ),
        held_out=("in what ways can mlxsrv be used", "how many ways are there to use it"),
    ),
    Topic(
        name="curl",
        subject="how to call it with curl",
        answer="Use curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: "
        'application/json\' -d \'{"messages": [{"role": "user", "content": "Hello"}]}\'.',
        keywords=("Use curl http",),
        things=("curl", "an example (with curl|request)", "the curl command"),
        tasks=(
            "(call|use|query|test|reach) (it|mlxsrv|the server|the api|you) (with|from|using) curl",
            "(send|make) a (request|http request|message|chat request|prompt)( with curl|)",
            "(call|query) the (api|server)( from the shell|)",
        ),
        asks=(
            "(give|show) me (a curl example|an example request|a curl command|a request)",
            "what does a (request|chat request|request body) look like",
            "curl example",
        ),
        held_out=("show me an example with curl", "how do i query the api using curl"),
    ),
    Topic(
        name="mount",
        subject="how to mount it in another app",
        answer='Write app.mount("/llm", mlxsrv.create_app()) in your Starlette, FastAPI or '
        "Litestar app. The API is then found under /llm/v1.",
        keywords=("Write app.mount",),
        things=("create_app", "app.mount", "mounting", "embedding the server in an app"),
        tasks=(
            "(mount|embed|include|integrate|put) (mlxsrv|it|the server) (in|into|inside) (my "
            "app|my own app|a fastapi app|a starlette app|fastapi|starlette|litestar|another app)",
            "use (it|mlxsrv) (with|inside|from) (fastapi|starlette|litestar|my own app|python)",
            "(add|mount) (it|mlxsrv|an llm) (to|in) my (web app|app|website|fastapi server)",
        ),
        asks=(
            "(can|does) (mlxsrv|it) (be mounted|work with fastapi|be embedded|mount)",
            "(fastapi|starlette|litestar|asgi) (integration|support|app)",
        ),
        held_out=("how do i embed mlxsrv into my fastapi app", "can it be part of my own app"),
    ),
    Topic(
        name="endpoints",
        subject="the endpoints",
        answer="The main endpoints are /v1/chat/completions, /v1/responses and /v1/embeddings for "
        "OpenAI's clients, /v1/messages for Anthropic's and /api/chat for Ollama's. GET "
        "/openapi.json lists all.",
        keywords=("The main endpoints are",),
        things=("the (endpoints|routes|api|paths|urls)", "the (http|rest|web) api", "the api"),
        tasks=("(see|list|find) (the|all) (endpoints|routes|paths|urls)",),
        asks=(
            "(which|what) (endpoints|routes|paths|urls|apis) (are there|exist|do you have|does it "
            "serve|does mlxsrv serve|does the server have|are available|can i call|are served)",
            "(list|name|show) (the|all|all the|your) (endpoints|routes|paths)",
            "what (is|are) the (api|available) (routes|endpoints)",
            "does (it|mlxsrv) have an api",
        ),
        held_out=("what endpoints does the server offer", "name every route of the api"),
    ),
    Topic(
        name="health",
        subject="the health check",
        answer="GET /health tells whether the server is up: it answers 200 when it is ready, and "
        "503 if not.",
        keywords=("GET /health tells",),
        things=("(the |)/health", "the health (check|endpoint|route)", "get /health"),
        tasks=(
            "(check|test|see|know|find out) (that|if|whether) (the server|it|mlxsrv) is (up|alive|"
            "running|ready|healthy|ok)",
            "(check|monitor) (the health|the server|the status)",
        ),
        asks=(
            "is (the server|mlxsrv|it) (up|alive|running|ready|healthy)",
            "(liveness|readiness|health) (probe|check)",
            "which (route|endpoint) is for (health checks|monitoring)",
        ),
        held_out=("how do i find out if mlxsrv is alive", "what is the health endpoint for"),
    ),
    Topic(
        name="models_list",
        subject="the list of models",
        answer="GET /v1/models lists the models that the server offers.",
        keywords=("GET /v1/models lists",),
        things=("(the |)/v1/models", "the (model list|list of models|models endpoint)"),
        tasks=("(list|see|get|show) (the|all|the available|the loaded|all the) models",),
        asks=(
            "(which|what) models (are there|are available|are loaded|are served|do you have|does "
            "the server have|can i use)",
            "(list|show)( me|) (your|the available|the loaded|all) models",
            "(which|what) (endpoint|route) lists (the |)models",
        ),
        held_out=("what models does this server have", "how can i see the available models"),
    ),
    Topic(
        name="completions",
        subject="plain completions",
        answer="POST /v1/completions continues a raw prompt, without a chat template.",
        keywords=("continues a raw prompt",),
        things=("(the |)/v1/completions", "the (text |plain |)completions endpoint", "completions"),
        tasks=(
            "(complete|continue) (a text|text|a prompt|a raw prompt)",
            "(use|call) (a base model|a raw prompt|plain completions|the completions endpoint)",
        ),
        asks=(
            "(can i|does it|do you) (send|complete|support) (a raw prompt|plain text|raw text)",
            "what is the difference between chat completions and completions",
            "is there a (plain|raw|text) completion( endpoint|)",
        ),
        held_out=("is there an endpoint for a raw prompt", "tell me about plain text completions"),
    ),
    Topic(
        name="streaming",
        subject="streaming",
        answer='Send "stream": true. The reply then comes as server-sent events: one data: frame '
        "for each piece of text, and data: [DONE] at the end.",
        keywords=("server-sent events", "[DONE]"),
        things=(
            "(streaming|the stream|stream|stream: true|a stream|streamed replies|sse)",
            "server-sent events",
            "the streaming (format|mode|protocol)",
        ),
        tasks=(
            "(stream|stream a reply|stream the reply|stream an answer|stream tokens|stream text)",
            "(get|receive|see|read) (the reply|the answer|tokens|text|words) (as it comes|piece by "
            "piece|one by one|token by token|while it is written|as a stream)",
            "(turn on|enable|use|switch on) (streaming|sse)",
        ),
        asks=(
            "(do you|does it|does mlxsrv|does the server) (stream|support streaming|support sse)",
            "how does (a stream|streaming|the stream) (end|work|look|finish)( here| in mlxsrv|)",
            "what (ends|closes|terminates) (a|the) stream",
            "what is (data: \\[done\\]|\\[done\\]|done at the end)",
            "is (streaming|sse) (supported|possible|available)",
        ),
        held_out=(
            "how can i receive the answer token by token",
            "does the server support streaming replies",
        ),
    ),
    Topic(
        name="keepalive",
        subject="keep-alive comments",
        answer="While a stream is silent, the server sends a comment line every 15 seconds to "
        "keep the connection alive. Change it with --keepalive.",
        keywords=("comment line every 15 seconds",),
        things=(
            "(the |)(keep-alive|keepalive|keep alive)( comments| comment| option| line|)",
            "--keepalive",
            "the comment (lines|line) in (the|a) stream",
        ),
        tasks=(
            "keep (the|a) (connection|stream) (alive|open)",
            "(change|set) the (keep-alive|keepalive)( interval| time|)",
        ),
        asks=(
            "why (do i see|are there|does the stream have) (comments|comment lines|empty comments)",
            "what if (a|the) (stream|connection) is (silent|idle|quiet)( for long|)",
            "how often (does it send|are) keep-alive comments( sent|)",
        ),
        held_out=(
            "what keeps a silent stream alive",
            "how often do you send a keepalive comment",
        ),
    ),
    Topic(
        name="choose_model",
        subject="how to choose a model",
        answer="Start it with --model ID_OR_PATH: a folder or a Hugging Face id. NAME=PATH gives "
        "it a name. Without --model you get the built-in demo model.",
        keywords=("--model ID_OR_PATH",),
        things=("--model", "the (--model|model) (option|flag)", "a model alias", "model aliases"),
        tasks=(
            "(choose|pick|select|load|use|set|change|serve|switch|specify) (a|another|the|my own|a "
            "different|a bigger|a real) (model|llm)",
            "(use|serve|load|run) (qwen|llama|mistral|gemma|a hugging face model|a local model|a "
            "model from a folder|a model from hugging face|my fine-tuned model)",
            "(serve|load|use) (two|several|many|multiple|more) models",
            "(give|add|set) (a model an alias|a model a name|an alias|a short name)",
        ),
        asks=(
            "(which|what) (option|flag|argument) (sets|chooses|selects|picks|is for) the model",
            "where do i (put|name|give) (my|the) model",
            "(what|which) (is the|model is the) default( model|)",
        ),
        held_out=(
            "how would i load my own model",
            "which flag do i use to pick another model",
            "i want to serve a bigger model",
        ),
    ),
    Topic(
        name="port",
        subject="the port",
        answer="The default port is 8000. Change it with --port, for example --port 9000.",
        keywords=("port is 8000",),
        things=("the (default |)port", "--port", "the port (number|option|flag)", "port 8000"),
        tasks=(
            "(change|set|choose|pick|configure) (the|a|another|a different) port( number|)",
            "(listen|run|serve|start) (it |the server |mlxsrv |)on (another|a different|a free|my "
            "own) port",
            "use port (9000|8080|80|5000|3000)",
        ),
        asks=(
            "(which|what) port (does|do|is|will|should) (it|mlxsrv|the server|i) (use|listen on|"
            "run on|open|be on)",
            "(on |)(which|what) port( is it| does it run| is used| is the server on|)",
            "port (8000|already|8000 already) (is |)(in use|taken|busy)",
        ),
        held_out=(
            "which port does mlxsrv listen on by default",
            "can i run it on a different port",
            "what port number is used",
        ),
    ),
    Topic(
        name="host",
        subject="the host",
        answer="The server listens on 127.0.0.1, which only this machine can reach. Use --host "
        "0.0.0.0 to let other machines in, and --api-key to let in only those who have the key.",
        keywords=("--host 0.0.0.0",),
        things=("the (default |)(host|address|ip|ip address)", "--host", "the (host|bind) option"),
        tasks=(
            "(change|set|choose|configure) the (host|address|ip|ip address|interface)",
            "(reach|access|call|open) (it|the server|mlxsrv) from (another|other|a different) "
            "(machine|computer|machines|host|device)",
            "(expose|share) (it|the server|mlxsrv)( on the network| on my lan| to others|)",
            "(listen on|bind to) (all interfaces|0.0.0.0|the network|another address)",
        ),
        asks=(
            "(which|what) (host|address|ip|interface) (does|do|is|will) (it|mlxsrv|the server) "
            "(use|listen on|bind to|be on)",
            "(can|may) (others|other machines|other computers|my phone) (reach|use|call) "
            "(it|the server|mlxsrv)",
        ),
        held_out=(
            "what address does the server bind to",
            "how can other computers reach it",
        ),
    ),
    Topic(
        name="max_tokens",
        subject="the length of a reply",
        answer="A chat reply may fill what is left of the model's context, unless the request sets "
        "max_tokens. Set a default with --default-max-tokens.",
        keywords=("left of the model's context",),
        things=(
            "max_tokens",
            "(the |)max tokens( default| limit|)",
            "the (maximum|default) (length|number of tokens)( of a reply|)",
            "--default-max-tokens",
            "the token limit",
        ),
        tasks=(
            "(limit|set|change|control|shorten|cap) the (length|size|number of tokens)( of a reply|"
            " of the answer| of replies|)",
            "(get|have|allow|make) (longer|shorter|long|short) (replies|answers|reply|answer)",
            "(set|change|raise|lower) (max_tokens|the token limit|max tokens)",
        ),
        asks=(
            "how (long|many tokens) (can|may) (a reply|an answer|the answer|a response) (be|have)",
            "(what|which) is the (longest|maximum) (reply|answer|output)",
            "how many tokens (do i get|are generated|can it write|does it write)( by default|)",
            "why (is|was) (my|the) (reply|answer) cut( off|)",
        ),
        held_out=(
            "how many tokens can a response have",
            "how do i limit the length of replies",
        ),
    ),
    Topic(
        name="queue",
        subject="the queue",
        answer="Up to 128 requests may wait in the queue of a model (--max-queue). When it is "
        "full, the server answers 503 with a Retry-After header.",
        keywords=("128 requests", "Retry-After"),
        things=(
            "the (queue|waiting queue|request queue|queue limit|queue size|waiting line)",
            "--max-queue",
            "(the |)retry-after( header|)",
            "(the |)503( error| status|)",
            "overload",
        ),
        tasks=(
            "(change|set|limit|raise|lower) the (queue|queue size|queue length|size of the queue)",
            "(handle|deal with|avoid) (a 503|overload|too many requests|a full queue)",
        ),
        asks=(
            "what (happens|if|do you do|happens if|happens when) (the queue is full|there are too "
            "many requests|the server is overloaded|the server is busy|too many people ask)",
            "how many requests (can|may) (wait|be waiting|be queued|queue|stand in line)",
            "how (long|big|large) is the queue",
            "why (do i get|did i get|is there) (a |an error |)503",
        ),
        held_out=(
            "what happens when too many requests come in",
            "how big can the queue get",
            "why did i receive a 503",
        ),
    ),
    Topic(
        name="concurrency",
        subject="concurrency",
        answer="Up to 32 requests are decoded together in one batch (--max-concurrency); the "
        "others wait in the queue.",
        keywords=("Up to 32 requests",),
        things=(
            "(the |)(concurrency|concurrency limit|parallelism)",
            "--max-concurrency",
            "(the number of |)(concurrent|parallel|simultaneous) requests",
        ),
        tasks=(
            "(change|set|limit|raise|lower) the (concurrency|number of concurrent requests|number "
            "of parallel requests|batch size)",
            "(serve|handle) (many|several|more|parallel) (users|clients|requests)",
        ),
        asks=(
            "how many (requests|users|clients|people|chats) (can|may) (run|be served|be handled|"
            "talk|ask|be decoded) (at once|at the same time|together|in parallel|concurrently)",
            "can (two|several|many|multiple) (users|clients|people|requests) (use it|run|be served|"
            "ask) (at once|at the same time|together|in parallel)",
            "does (it|mlxsrv|the server) (support|handle) (concurrency|parallel requests)",
        ),
        held_out=(
            "how many clients can be served at the same time",
            "does mlxsrv handle parallel requests well",
        ),
    ),
    Topic(
        name="batching",
        subject="continuous batching",
        answer="mlxsrv uses continuous batching: a new request joins the running batch at the "
        "next step, and a finished one leaves it at once.",
        keywords=("joins the running batch",),
        things=(
            "(continuous |)batching",
            "(the |a |)batch",
            "how requests are batched",
            "continuous batching in mlxsrv",
        ),
        tasks=("(batch|combine|group) (requests|prompts)( together|)",),
        asks=(
            "(do you|does it|does mlxsrv|does the server) (batch|use batching|batch requests|"
            "support batching|do continuous batching)",
            "(how|when) (does|can) a (new |)request join (the|a) batch",
            "how are requests (batched|combined|grouped|scheduled)",
            "must a request wait for (the others|other requests|the batch) to (finish|end)",
        ),
        held_out=(
            "what does continuous batching mean",
            "how does the server batch requests",
        ),
    ),
    Topic(
        name="device_thread",
        subject="the device thread",
        answer="One thread, the device thread, makes every MLX call. The event loop never "
        "touches the model, so the server stays responsive.",
        keywords=("the device thread, makes every MLX call",),
        things=(
            "the (device|mlx|gpu|model) thread",
            "the (threads|threading|thread model|threading model)",
            "the event loop",
        ),
        asks=(
            "how many threads (are there|do you use|does it use|does mlxsrv use|call mlx)",
            "(which|what) thread (calls|runs|talks to|uses) (mlx|the model|the gpu)",
            "(is mlxsrv|is it|is the server) (multi-threaded|thread safe|threaded|single-threaded)",
            "(why|is there) (only |)one thread( for mlx|)",
            "does the (model|gpu|computation) block the event loop",
        ),
        held_out=(
            "what is the device thread for",
            "which of the threads makes the mlx calls",
        ),
    ),
    Topic(
        name="timeout",
        subject="the time limit",
        answer="A request may wait in the queue for 300 seconds (--queue-timeout), and may then "
        "take as long as it needs, unless you set --request-timeout.",
        keywords=("300 seconds", "--request-timeout"),
        things=(
            "(the |)(timeout|timeouts|time limit|request timeout|time-out|deadline|504)",
            "--request-timeout",
            "a (504|timeout) error",
        ),
        tasks=(
            "(change|set|raise|lower|extend|disable) the (timeout|time limit|request timeout)",
            "(give|allow) (a request|requests|it) more time",
        ),
        asks=(
            "how long (can|may|does) (a request|one request|it) (take|run|last)",
            "(when|why) (does|did) (a|my|the) request (time out|timeout|expire)",
            "is there a (timeout|time limit|deadline)",
            "what (happens|if) (a request takes|when a request takes) too long",
        ),
        held_out=(
            "how long is a request allowed to take",
            "can i raise the time limit",
        ),
    ),
    Topic(
        name="stop_strings",
        subject="stop strings",
        answer='Send "stop" with one string or a list of them. The reply ends before the first one '
        "that appears.",
        keywords=('Send "stop"',),
        things=(
            "(the |)stop( strings| string| words| word| sequences| sequence| parameter|)",
            "stopping at a word",
        ),
        tasks=(
            "(stop|end) (a reply|the reply|the answer|generation|the text) (at|on|before) (a "
            "word|a string|a certain word|some text|a newline)",
            "(use|set|send|give|add) (a stop string|stop strings|stop words|a stop word|stop)",
        ),
        asks=(
            "(do you|does it|does mlxsrv) (support|have|know) stop (strings|words|sequences)",
            "how many stop (strings|words|sequences) (can i|may i) (send|use|give)",
            "where does a reply end with stop",
        ),
        held_out=(
            "how do i end the answer at a certain string",
            "does it support stop strings",
        ),
    ),
    Topic(
        name="temperature",
        subject="temperature",
        answer="temperature sets how random the reply is, from 0 to 2. At 0 the most likely token "
        "is always taken; top_p keeps only the likeliest tokens.",
        keywords=("how random the reply is",),
        things=(
            "(the |)temperature( setting| parameter| option|)",
            "(the |)top_p( parameter|)",
            "(the |)(sampling|sampling parameters|sampler|randomness|nucleus sampling)",
        ),
        tasks=(
            "(make|get) (the |)(replies|answers|reply|answer|output) more (random|creative|varied)",
            "(set|change|use|lower|raise) (temperature|the temperature|top_p|the sampling)",
            "(control|change|set) the (randomness|creativity|sampling)",
        ),
        asks=(
            "(which|what) (temperature|sampling parameters|top_p) (should i use|can i use|are "
            "there|can i send|is supported)",
            "(do you|does it|does mlxsrv) (support|have|know) (temperature|top_p|sampling)",
            "what (does|is) temperature (0|zero|1|one|2)",
        ),
        held_out=(
            "what does the temperature parameter do",
            "how can i make answers more creative",
        ),
    ),
    Topic(
        name="seed",
        subject="the seed",
        answer='Send a "seed": the same request with the same seed gives the same reply.',
        keywords=('Send a "seed"',),
        things=("(the |a |)seed( parameter| option|)", "reproducibility", "a random seed"),
        tasks=(
            "(get|have|receive) the same (reply|answer|output|text) (again|twice|every time)",
            "(make|get) (replies|answers|the output|it|the reply) (reproducible|deterministic|"
            "repeatable)",
            "(set|use|send|fix|give) (a|the) seed",
        ),
        asks=(
            "(are|is) (replies|the output|the answers|mlxsrv|it) (reproducible|deterministic)",
            "(do you|does it|does mlxsrv) (support|have|know) (a seed|seeds|seed)",
            "why (is|are) the (reply|replies|answers) (different|not the same) (each|every) time",
        ),
        held_out=(
            "how can i make the output reproducible",
            "what do i use the seed for",
        ),
    ),
    Topic(
        name="errors",
        subject="errors",
        answer='An error is JSON of the form {"error": {"message": ..., "type": ..., "param": '
        '..., "code": ...}}, as OpenAI clients expect.',
        keywords=("An error is JSON",),
        things=(
            "(the |an |)(errors|error|error format|error object|error response|error messages)",
            "the (shape|format|form) of (an error|errors)",
            "error handling",
        ),
        tasks=("(handle|read|parse|understand|catch) (errors|an error|error messages)",),
        asks=(
            "what (does|do) (an error|errors|a failure|the error|a bad request) look like",
            "what (happens|do i get|is returned|comes back) (if|when) (something goes wrong|a "
            "request is wrong|my request is bad|a request fails|there is an error)",
            "how (are errors|does it|does the server) (reported|report errors|returned|told)",
            "(which|what) fields does an error have",
        ),
        held_out=(
            "what do errors look like",
            "in which format are errors returned",
        ),
    ),
    Topic(
        name="request_id",
        subject="request ids",
        answer="Every reply carries an X-Request-ID header. Send your own X-Request-ID and it is "
        "used, so that you can find the request in the log.",
        keywords=("X-Request-ID header",),
        things=(
            "(the |a |)(request id|request ids|x-request-id|x-request-id header)",
            "tracing( requests|)",
        ),
        tasks=(
            "(find|trace|follow|identify) (a|my|one) request( in the log| in the logs|)",
            "(set|send|get|see|read) (a|the|my own) (request id|x-request-id)",
        ),
        asks=(
            "(does|do) (a|each|every|the) (request|reply|requests) have an id",
            "(what|which) header (has|holds|carries|contains) the (request id|id)",
            "where is the request id",
        ),
        held_out=(
            "how can i trace a request in the logs",
            "which header carries the request id",
        ),
    ),
    Topic(
        name="shutdown",
        subject="how to stop the server",
        answer="Press Ctrl-C. New requests are refused, and running ones get 10 seconds to finish "
        "before the server exits.",
        keywords=("Press Ctrl-C", "10 seconds"),
        things=(
            "(the |)(shutdown|graceful shutdown|grace period|ctrl-c|shutdown grace)",
            "--shutdown-grace",
        ),
        tasks=(
            "(stop|quit|exit|shut down|kill|end|close|terminate|turn off) (the server|mlxsrv|it|"
            "this server)",
        ),
        asks=(
            "what (happens|does it do) (on|at|when i press|after) (shutdown|ctrl-c|sigterm)",
            "what happens to running requests (at shutdown|when the server stops|when i stop it)",
            "how does (the server|it|mlxsrv) (stop|shut down|end|exit)",
            "how long (is the grace period|does shutdown take)",
        ),
        held_out=(
            "how can i shut the server down",
            "what happens to running requests on ctrl-c",
        ),
    ),
    Topic(
        name="openai_sdk",
        subject="the OpenAI SDK",
        answer='Create the client with OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")'
        " and use it as you always do.",
        keywords=("base_url=",),
        things=(
            "the openai (sdk|client|library|package|python client)",
            "(the |)(base_url|base url|api_key|api key)",
            "openai compatibility",
        ),
        tasks=(
            "use (the openai|openai's|an openai) (sdk|client|library|package|python client)( with "
            "it| with mlxsrv| here|)",
            "(connect|point) (an|the|my) openai (client|sdk|app) (to|at) (mlxsrv|it|this server)",
            "(call|use) (it|mlxsrv|the server) from (python|javascript|node|my code|code)",
        ),
        asks=(
            "(does|will|can) (the openai|openai) (sdk|client|library|package) work( with it| with "
            "mlxsrv| here|)",
            "(is it|is mlxsrv|are you) (openai compatible|compatible with openai)",
            "(which|what) (base_url|base url|api key|url) (do i use|should i use|do i need)",
            "do i need an api key",
        ),
        held_out=(
            "how do i connect my openai client to mlxsrv",
            "what base url should i use",
        ),
    ),
    Topic(
        name="licence",
        subject="the licence",
        answer="mlxsrv is free software under the MIT licence.",
        keywords=("MIT licence",),
        things=("the (licence|license|copyright|terms)",),
        asks=(
            "(which|what) (licence|license) (does|is|has) (mlxsrv|it|this|used|the project)( have| "
            "under| use|)",
            "(is mlxsrv|is it|is this) (open source|free|free software|mit licensed|free to use)",
            "(can|may) i (use|sell|copy|change) (it|mlxsrv) (commercially|at work|for free|freely)",
            "(how much|what) does (it|mlxsrv) cost",
            "who owns (mlxsrv|it)",
        ),
        held_out=("under which license is mlxsrv", "is this open source software"),
    ),
    Topic(
        name="why_starlette",
        subject="why it uses Starlette and msgspec",
        answer="Starlette is a small ASGI toolkit that mounts anywhere, and msgspec checks and "
        "encodes JSON very fast. A lean server needs little more.",
        keywords=("Starlette is a small ASGI toolkit",),
        things=("starlette", "msgspec", "starlette and msgspec", "the (tech stack|frameworks)"),
        asks=(
            "why (do you use |does it use |does mlxsrv use |use |)(starlette|msgspec|starlette and "
            "msgspec|not fastapi|not pydantic|not flask)",
            "(what|which) (framework|web framework|libraries|dependencies|library|stack) (is it "
            "built on|does it use|does mlxsrv use|do you use|is used)",
            "what is (mlxsrv|it) (built on|built with|made of|written in)",
            "(is it|is mlxsrv) (fastapi|flask|django|built on starlette|written in python)",
        ),
        held_out=("why was starlette chosen", "which web framework does mlxsrv use"),
    ),
    Topic(
        name="mlx",
        subject="what MLX is",
        answer="MLX is an array framework for machine learning, made by Apple for its own chips. "
        "It also runs on Linux, on CPUs and on CUDA.",
        keywords=("MLX is an array framework",),
        things=("mlx", "apple's mlx", "the mlx (library|framework)", "apple mlx"),
        asks=(
            "(who|what company) (made|makes|wrote|develops) mlx",
            "what (does|do) mlx (stand for|mean|do)",
            "what is (mlx|the mlx library) (for|good for|about|used for)",
            "(is mlx|mlx is) (from|by|made by) apple",
            "what (kind|sort) of (framework|library) is mlx",
        ),
        held_out=("tell me what mlx is", "who is the maker of mlx"),
    ),
    Topic(
        name="mlx_lm",
        subject="mlx-lm",
        answer="mlx-lm is the library that loads and runs language models with MLX. mlxsrv "
        "serves every model that mlx-lm can load.",
        keywords=("mlx-lm is the library",),
        things=("mlx-lm", "mlx_lm", "the mlx-lm library"),
        tasks=("use mlx-lm",),
        asks=(
            "(which|what) (kinds of models|model types|architectures|model formats|formats) (are "
            "supported|does it support|can it load|does mlxsrv support|work)",
            "(do you|does it|does mlxsrv) use mlx-lm",
            "does (it|mlxsrv) support (gguf|safetensors|quantised models|quantized models|lora)",
        ),
        held_out=("what is the mlx-lm library", "what model architectures can it load"),
    ),
    Topic(
        name="tools",
        subject="tool calling",
        answer='Send "tools" with JSON schemas. When the model wants one, the reply has '
        'tool_calls; send the result back in a message with the role "tool".',
        keywords=('Send "tools"',),
        things=(
            "(tool|function) (calling|calls|use)",
            "(the |)tools( parameter|)",
            "the (role tool|tool role|tool_calls field)",
        ),
        tasks=(
            "(use|send|give it|define|call) (tools|functions|a tool|a function)",
            "(send|return) (the result of a tool|a tool result)( back|)",
        ),
        asks=(
            "(do you|does it|does mlxsrv|can you|can it) (support|call|have|do|use) (tools|"
            "functions|tool calling|function calling|tool calls)",
            "are (tools|tool calls|functions) supported",
        ),
        held_out=("does mlxsrv support function calling", "how do tool calls work"),
    ),
    Topic(
        name="thinking",
        subject="thinking",
        answer="A model that can think writes its thoughts first; mlxsrv returns them apart from "
        "the answer, in reasoning_content.",
        keywords=("writes its thoughts first",),
        things=(
            "(thinking|reasoning|the thinking mode|reasoning_content|enable_thinking)",
            "the (thoughts|think block|reasoning field)",
        ),
        tasks=(
            "(turn on|turn off|enable|disable|switch off|see|hide|get) (thinking|reasoning|the "
            "thoughts|the reasoning)",
        ),
        asks=(
            "(can you|do you|does it|does the model|can it) (think|reason|support thinking|support "
            "reasoning)",
            "where (are|is|do i find) the (thoughts|reasoning|thinking)",
        ),
        held_out=("how can i disable thinking", "where do i see the reasoning"),
    ),
    Topic(
        name="config",
        subject="the configuration",
        answer="Every option is a flag, a variable such as MLXSRV_PORT, or a key of a TOML file "
        "named with --config. A flag wins over a variable, a variable over the file.",
        keywords=("Every option is a flag",),
        things=(
            "(the |)(configuration|config|settings|options|environment variables|flags)",
            "--config",
            "the (config|toml|settings) file",
        ),
        tasks=(
            "(configure|set up|customise|customize) (it|mlxsrv|the server)",
            "use (a config file|a toml file|environment variables|env vars)",
            "(see|list|show) (all|the) (options|flags|settings)",
        ),
        asks=(
            "(which|what) (options|flags|settings|environment variables) (are there|exist|does it "
            "have|does mlxsrv have|can i set)",
            "(does it|does mlxsrv|can it) (read|have|use) a (config|toml|settings) file",
            "(what|which) wins,? (a flag or a variable|the flag or the file)",
        ),
        held_out=("is there a config file", "what options does mlxsrv have"),
    ),
    Topic(
        name="usage_count",
        subject="token usage",
        answer="The reply has a usage field with prompt_tokens, completion_tokens and "
        'total_tokens. In a stream, ask for it with stream_options {"include_usage": true}.',
        keywords=("usage field",),
        things=(
            "(the |)(usage field|usage object|token usage|token counts|include_usage)",
            "prompt_tokens",
            "stream_options",
        ),
        tasks=("(count|see|get|know) (the tokens|the token usage|how many tokens were used)",),
        asks=(
            "how many tokens (did i use|were used|did that cost|did my request use)",
            "where (is|do i see|do i find) the (token usage|usage|token count)",
            "does (a stream|it|the reply) (have|include|report|contain) (usage|token usage|token "
            "counts)",
        ),
        held_out=("how do i get the token usage", "does the reply report token counts"),
    ),
    Topic(
        name="prefill",
        subject="prefill",
        answer="A long prompt is read in chunks of at most 512 tokens between two decode steps "
        "(--prefill-chunk), so that it does not hold up the other replies.",
        keywords=("chunks of at most 512 tokens",),
        things=("(the |)prefill( chunk| chunks| size|)", "--prefill-chunk", "chunked prefill"),
        asks=(
            "how (are|is) (a long prompt|long prompts|the prompt) (read|handled|processed)",
            "(does|will) a long prompt (block|slow down|hold up|stall) (the others|other "
            "requests|other replies|everything)",
            "what (happens with|about) (long prompts|a long prompt|very long prompts)",
        ),
        held_out=("how does mlxsrv handle long prompts", "what is the prefill chunk"),
    ),
    Topic(
        name="speed",
        subject="how fast it is",
        answer="That depends on your machine and your model. The server itself adds very little: "
        "tokens are sent as soon as the device has them.",
        keywords=("adds very little",),
        things=("the (speed|performance|latency|throughput|overhead)",),
        asks=(
            "how (fast|quick|slow) (is it|is mlxsrv|are you|is the server|is this)",
            "is (it|mlxsrv|the server) (fast|slow|quick|efficient)",
            "how many tokens per second( do i get| does it make| can it do|)",
            "what (speed|latency|throughput) (do i get|can i expect)",
            "why is (it|mlxsrv|this|the server) so (slow|fast)",
        ),
        held_out=("how quick is mlxsrv", "what performance can i expect"),
    ),
    Topic(
        name="logs",
        subject="the log",
        answer="The log goes to the terminal. Choose --log-level debug, info, warning or error, "
        "and --log-format text or json.",
        keywords=("--log-level debug",),
        things=("(the |)(log|logs|logging|log level|log format)", "--log-level", "--log-format"),
        tasks=(
            "(see|read|find|change|get|turn on|silence) the (log|logs|log level|logging)",
            "(get|have|write) (json logs|logs as json|debug logs|fewer log lines)",
            "debug( a problem| the server| mlxsrv|)",
        ),
        asks=("where (are|is|do i find) the (log|logs|log file)",),
        held_out=("how do i get logs in json", "where can i find the log"),
    ),
    # --- things to show off
    Topic(
        name="joke",
        subject="a joke",
        answer="Why did the token cross the stream? To get to the other [DONE].",
        keywords=("Why did the token cross",),
        asks=(
            "(tell|give|write|make)( me|) (a|another|some|one) (joke|jokes|funny joke|short joke)",
            "(do you know|know|have you got) (a|any|some) (joke|jokes|good jokes)",
            "(make me laugh|be funny|say something funny|i want to laugh|entertain me|a joke)",
            "(i need|i want|i would like) a (joke|laugh)",
        ),
        held_out=("could you tell a good joke", "i would like to hear a joke"),
    ),
    Topic(
        name="poem",
        subject="a poem",
        answer="A token leaves, a token lands,\nA stream runs lightly through my hands.\n"
        "I hold no world, I know no seas,\nBut I can answer, if you please.",
        keywords=("A token leaves",),
        asks=(
            "(write|tell|give|compose|make|recite|say)( me|) (a|another|some|one|a short) (poem|"
            "poetry|verse|rhyme|haiku|song|little poem)( about mlxsrv| about streams| about you|)",
            "(do you know|know) (a|any) (poem|poems|rhyme)",
            "(a poem|a short poem|poem|some poetry|be a poet|sing me a song)",
        ),
        held_out=("can you write a little poem", "i would love to read a short poem"),
    ),
    Topic(
        name="story",
        subject="a story",
        answer="Once upon a time there was a small model that lived inside a server. It knew only "
        "a few things, but it knew them well. One day a traveller came by and asked: "
        '"How do I stream a reply?" The small model was happy, for it knew the answer. '
        '"Send stream: true," it said, and the words began to flow, one by one, like water down '
        "a hill. The traveller smiled, thanked the model and went on to build a great app. And "
        "the small model went back to sleep, and waited for the next request.",
        keywords=("Once upon a time",),
        asks=(
            "(tell|write|give|read|make up)( me|) (a|another|one|some|a short|a long|a little) "
            "(story|tale|fairy tale|bedtime story)( about mlxsrv| about a model| about you|)",
            "(do you know|know) (a|any) (story|stories|tale)",
            "(a story|story time|a short story|once upon a time|i want a story)",
            "(say|write|tell me) something long",
        ),
        held_out=("can you tell a bedtime story", "i would love to hear a tale"),
    ),
    Topic(
        name="everything",
        subject="everything about mlxsrv",
        answer="mlxsrv is a lean server for MLX language models that speaks the APIs of OpenAI, "
        "Anthropic and Ollama. You start it with the command mlxsrv, and it listens on port 8000 "
        "of this machine. It serves a page, chats, plain completions, embeddings, a list of "
        "models and a health check. Replies can be streamed "
        "as server-sent events. Requests are decoded together by continuous batching, and one "
        "thread makes every MLX call. When too many requests wait, the server answers 503 and "
        "tells the client when to try again. It is free software under the MIT licence.",
        keywords=("speaks the APIs of OpenAI",),
        asks=(
            "(tell|teach|explain)( me|) (everything|all|a lot|as much as you can|all you know)( "
            "about mlxsrv| about this server| about it|)",
            "(give|write)( me|) (a long|a full|a detailed|a complete) (description|answer|"
            "introduction|overview|text|essay)( of mlxsrv| about mlxsrv|)",
            "(describe|explain|introduce) mlxsrv (in detail|at length|in full|completely)",
            "what (else |)(do|can) you (know|tell me) about mlxsrv( in detail|)",
        ),
        held_out=(
            "write a long text about mlxsrv",
            "explain everything you know about this server",
        ),
    ),
    Topic(
        name="help",
        subject="what they can ask",
        answer="Ask me, for example: What is mlxsrv? How do I start it? How do I stream a reply? "
        "How do I choose a model? Which endpoints are there?",
        keywords=("Ask me, for example",),
        asks=(
            "help( me| please|)",
            "what (can|could|should|may) i ask( you|)",
            "(i need|can you|could you|please|give me) (some |)help( me|)",
            "(give|show|suggest)( me|) (some |a few |an |)(examples|questions|ideas|example "
            "questions|suggestions)",
            "what (do|should) i do (now|first|here)",
            "i (don't|do not) know what to ask",
            "(what questions|which questions) (can you answer|do you answer|do you know)",
        ),
        held_out=("what questions could i ask you", "please give me a few example questions"),
    ),
    Topic(
        name="json",
        subject="an answer in JSON",
        answer='{"name": "mlxsrv", "port": 8000, "streaming": true}',
        keywords=('{"name": "mlxsrv"',),
        asks=(
            "(answer|reply|respond|write|say something|speak) (in|as|with) (json|a json object)",
            "(give|show|write|send)( me|) (some|a|an example of|valid) json( object| please|)",
            "describe (mlxsrv|yourself|the server) (in|as) json",
            "(return|output|print) (some |a |)json( object|)",
        ),
        held_out=("please reply with a json object", "describe this server as json"),
    ),
    # --- other scripts
    Topic(
        name="emoji",
        subject="emoji",
        answer="🙂 🚀 🎉 🐍 🌍 👋🏽 ❤️",
        keywords=("🚀", "🎉"),
        asks=(
            "(reply|answer|respond|talk|speak|write|say something) (with|in|using|only in|only with"
            ") (emoji|emojis|an emoji|some emoji|smileys)",
            "(send|show|give|write)( me|) (an|some|a few|your favourite|a row of|) (emoji|emojis|"
            "smiley|smileys)",
            "(do you|can you) (know|speak|write|use|send|support) (emoji|emojis|smileys)",
            "(emoji|emojis|emoji please|🙂|😀|👋|🎉|😀😀|👍|❤️|🚀🚀|😂|🤖|🙏|😊)",
        ),
        held_out=("please answer only using emoji", "can you show me some emojis"),
    ),
    Topic(
        name="japanese",
        subject="a greeting in Japanese",
        answer="こんにちは！私はmlxsrvの小さなモデルです。",
        keywords=("こんにちは",),
        things=("hello in japanese",),
        asks=(
            "(say|write|greet me|answer|reply|speak|talk)( hello| hi| something|) in japanese",
            "how do you say (hello|hi) in japanese",
            "(do you|can you) (speak|know|write|understand)( any| some|) japanese",
            "(こんにちは|日本語で|日本語で挨拶して|日本語で答えて|日本語を話せますか|おはよう|はじめまして)",
            "(日本語で挨拶してください|あなたは誰ですか|元気ですか|もしもし|こんばんは|ありがとう)",
        ),
        held_out=("please say something in japanese", "日本語で答えてください"),
    ),
    Topic(
        name="chinese",
        subject="a greeting in Chinese",
        answer="你好！我是mlxsrv的小模型，很高兴认识你。",
        keywords=("你好",),
        things=("hello in chinese", "hello in mandarin"),
        asks=(
            "(say|write|greet me|answer|reply|speak|talk)( hello| hi| something|) in (chinese|"
            "mandarin)",
            "how do you say (hello|hi) in (chinese|mandarin)",
            "(do you|can you) (speak|know|write|understand)( any| some|) (chinese|mandarin)",
            "(你好|您好|用中文打个招呼|用中文打招呼|请用中文回答|你会说中文吗|你是谁|中文|说中文)",
            "(用中文说你好|请说中文|你好吗|早上好|谢谢|你能说中文吗|大家好|请打个招呼)",
        ),
        held_out=("please say something in chinese", "请用中文打个招呼"),
    ),
    Topic(
        name="german",
        subject="a greeting in German",
        answer="Guten Tag! Ich bin das kleine Modell von mlxsrv und grüße dich aus Köln.",
        keywords=("grüße",),
        things=("hello in german",),
        asks=(
            "(say|write|greet me|answer|reply|speak|talk)( hello| hi| something|) in german",
            "how do you say (hello|hi) in german",
            "(do you|can you) (speak|know|write|understand)( any| some|) german",
            "(sag|sage|schreib)( mir|) (hallo|guten tag|etwas)( auf deutsch| bitte|)",
            "(guten tag|guten morgen|grüß gott|grüß dich|wie geht es dir|wer bist du|moin|servus)",
            "(sprichst du|kannst du|verstehst du) deutsch",
            "(auf deutsch|antworte auf deutsch|bitte auf deutsch|antworte bitte auf deutsch)",
        ),
        held_out=("please say something in german", "schreib mir bitte auf deutsch"),
    ),
    Topic(
        name="french",
        subject="a greeting in French",
        answer="Bonjour ! Je suis le petit modèle de mlxsrv, enchanté de faire ta connaissance.",
        keywords=("enchanté",),
        things=("hello in french",),
        asks=(
            "(say|write|greet me|answer|reply|speak|talk)( hello| hi| something|) in french",
            "how do you say (hello|hi) in french",
            "(do you|can you) (speak|know|write|understand)( any| some|) french",
            "(dis bonjour|dis-moi bonjour|bonjour|salut|ça va|coucou|bonsoir|qui es-tu)",
            "(parles-tu français|tu parles français|en français|réponds en français)",
        ),
        held_out=("please say something in french", "tu parles français oui"),
    ),
    Topic(
        name="spanish",
        subject="a greeting in Spanish",
        answer="¡Hola! Soy el pequeño modelo de mlxsrv. ¿Qué quieres saber mañana?",
        keywords=("pequeño",),
        things=("hello in spanish",),
        asks=(
            "(say|write|greet me|answer|reply|speak|talk)( hello| hi| something|) in spanish",
            "how do you say (hello|hi) in spanish",
            "(do you|can you) (speak|know|write|understand)( any| some|) spanish",
            "(hola|¿hablas español?|di hola|buenos días|en español|¿cómo estás?|¿quién eres?)",
            "(buenas noches|di algo en español|responde en español|hola amigo)",
        ),
        held_out=("please say something in spanish", "hola buenos días"),
    ),
)
