"""The tools that the demo model practises on.

Names, argument names, wordings and schema styles all vary, so that the model has to read them
off the request's tool list instead of remembering them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

ArgumentValue = str | int
Draw = Callable[[random.Random], ArgumentValue]


def listed(text: str) -> tuple[str, ...]:
    """The values of a comma-separated table."""
    return tuple(" ".join(value.split()) for value in text.split(","))


CITIES = listed(
    """
    Paris, Tokyo, Berlin, London, Madrid, Rome, Vienna, Oslo, Athens, Cairo, Lima, Delhi,
    Dublin, Boston, Seoul, Sydney, Munich, Milan, Zurich, Geneva, Prague, Warsaw, Lisbon,
    Moscow, Beijing, Shanghai, Toronto, Chicago, Seattle, Austin, Denver, Dallas, Miami,
    Houston, Helsinki, Stockholm, Copenhagen, Amsterdam, Brussels, Budapest, Istanbul,
    Mumbai, Bangkok, Singapore, Jakarta, Manila, Nairobi, Lagos, Hamburg, Cologne,
    Frankfurt, Barcelona, Valencia, Naples, Florence, Venice, Lyon, Marseille, Nice,
    Bordeaux, Kyoto, Osaka, New York, San Francisco, Los Angeles, Mexico City, Hong Kong,
    Cape Town, São Paulo, Buenos Aires, Tel Aviv, Rio de Janeiro, Zürich, Köln
    """
)
NAMES = listed(
    """
    Anna, Ben, Carla, David, Emma, Felix, Grace, Hugo, Ivy, Jack, Kate, Leo, Mia, Noah,
    Olivia, Paul, Quinn, Rosa, Sam, Tina, Uma, Victor, Wendy, Xavier, Yara, Zoe, Alice, Bob,
    Carol, Dan, Eve, Frank, Ada, Alan, Linus, Guido, Maria, John, Jane, Peter, Laura, Tom,
    Max, Sophie, Clara, Jonas, Lena, Omar, Priya, Chen, Yuki, Ravi
    """
)
WORDS = listed(
    """
    red, blue, green, fast, slow, cheap, best, good, new, old, small, big, hot, cold, fresh,
    local, open, free, quiet, flight, flights, hotel, hotels, pizza, coffee, tea, books,
    music, movie, movies, news, train, trains, bus, shoes, bike, bikes, laptop, phone,
    camera, garden, kitchen, recipe, recipes, cake, soup, bread, apple, bananas, python,
    rust, java, linux, learning, machine, cloud, data, code, stars, planet, moon, sun, rain,
    snow, river, mountain, forest, cat, cats, dog, dogs, horse, bird, fish, museum, park,
    beach, hiking, running, yoga, chess, football, tennis, history, science, math, physics,
    art, jazz, guitar, piano, restaurant, restaurants, weather, energy, solar, battery, car,
    cars, electric, milk, eggs, cheese, water, house, houses, school, doctor, paper, table,
    chair, window, door, street, bridge, island, ship, ships, plane, ticket, tickets,
    winter, summer, spring, autumn, morning, night, color, white, black, gold, silver, wood,
    glass, stone, fire, wind, tree, trees, flower, flowers, dance, theater, dinner, lunch,
    breakfast, salad, rice, pasta, wine, juice, sugar, salt, buy, sell, learn, meeting,
    tomorrow, today, late, early, family, friend, friends, happy
    """
)
LANGUAGES = listed(
    """
    German, French, Spanish, Italian, Japanese, Chinese, Korean, Dutch, Polish, Greek
    """
)
CURRENCIES = listed("USD, EUR, GBP, JPY, CHF, CAD, AUD, SEK, NOK, INR")
STOCKS = listed("AAPL, MSFT, GOOG, AMZN, NVDA, TSLA, META, IBM, INTC, AMD, ORCL, SAP, NFLX")
COUNTRIES = listed(
    """
    France, Germany, Spain, Italy, Japan, China, India, Brazil, Canada, Mexico, Egypt,
    Kenya, Norway, Sweden, Poland, Greece, Turkey, Peru, Chile, Cuba, Ireland, Iceland,
    Finland, Denmark, Austria, Portugal
    """
)
ROOMS = listed("kitchen, bedroom, bathroom, office, garage, hall, garden, living room")
SYLLABLES = listed(
    """
    ba, be, bor, ca, chi, da, den, dor, el, fa, fi, ga, gar, ha, hel, in, ja, ka, kel, la,
    len, li, lo, ma, mar, men, mi, mo, na, nor, o, pa, per, ra, ri, ro, sa, san, sel, shi, sta,
    ta, ter, ti, to, tra, u, va, ven, vi, wa, wil, ya, zan, zo
    """
)
VERBS = listed(
    """
    get, find, fetch, look_up, check, read, run, make, open, load, show, list, count,
    create, delete
    """
)
NOUNS = listed(
    """
    order, user, file, ticket, page, room, item, task, record, report, device, account,
    note, job
    """
)


def pick(values: tuple[str, ...]) -> Draw:
    return lambda rng: rng.choice(values)


def invented(rng: random.Random) -> str:
    """A proper name that nobody has heard of, so that copying is learnt and not a list of names."""
    return "".join(rng.choices(SYLLABLES, k=rng.choice((2, 2, 3)))).capitalize()


def city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.65 else invented(rng)


def person(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.65 else invented(rng)


def phrase(rng: random.Random) -> str:
    return " ".join(rng.sample(WORDS, rng.choice((1, 2, 2, 3))))


def number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.choice((1, 1, 2, 2, 3, 4)))


def clock(rng: random.Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}"


def code(rng: random.Random) -> str:
    return f"{rng.choice('ABCDEFGHKLMNPRSTXYZ')}{rng.randrange(10, 10000)}"


@dataclass(frozen=True, slots=True)
class Parameter:
    keys: tuple[str, ...]
    draw: Draw
    kind: str = "string"
    description: str = ""


@dataclass(frozen=True, slots=True)
class ToolKind:
    """One sort of tool: its possible names, what it takes, and how people ask for it.

    In `asks`, `{0}` and `{1}` stand for the argument values.
    """

    names: tuple[str, ...]
    description: str
    parameters: tuple[Parameter, ...]
    asks: tuple[str, ...]


CITY = Parameter(("city", "location", "place", "town", "city_name"), city, description="City")

TOOL_KINDS: tuple[ToolKind, ...] = (
    ToolKind(
        (
            "get_weather",
            "weather",
            "getWeather",
            "get_current_weather",
            "weather_lookup",
            "forecast",
        ),
        "Get the current weather in a city",
        (CITY,),
        (
            "(what is|what's|how is|how's|tell me|give me|check) the weather( like|) in {0}",
            "(is it|will it be) (raining|sunny|warm|cold|hot|windy|snowing) in {0}( today| now|)",
            "(weather|forecast|temperature) (in|for) {0}",
            "how (warm|cold|hot) is it in {0}( now| today|)",
            "do i need an umbrella in {0}",
            "what is the (temperature|forecast) in {0}",
        ),
    ),
    ToolKind(
        ("get_time", "time", "getTime", "current_time", "get_current_time", "clock"),
        "Get the local time in a city",
        (CITY,),
        (
            "what time is it in {0}( now| right now|)",
            "(what is|what's|tell me|give me|check) the (time|local time|current time) in {0}",
            "(time|local time) in {0}",
        ),
    ),
    ToolKind(
        ("add", "add_numbers", "sum", "plus"),
        "Add two numbers",
        (
            Parameter(("a", "x", "first", "left"), number, "integer"),
            Parameter(("b", "y", "second", "right"), number, "integer"),
        ),
        (
            "(add|sum|add up) {0} and {1}",
            "(what is|what's|compute|calculate|how much is) {0} (plus|+) {1}",
            "{0} (+|plus) {1}",
            "what is the sum of {0} and {1}",
            "add {0} to {1}",
        ),
    ),
    ToolKind(
        ("multiply", "times", "product", "mul"),
        "Multiply two numbers",
        (
            Parameter(("a", "x", "first", "left"), number, "integer"),
            Parameter(("b", "y", "second", "right"), number, "integer"),
        ),
        (
            "multiply {0} (by|and|with) {1}",
            "(what is|what's|compute|calculate|how much is) {0} (times|x|*|multiplied by) {1}",
            "{0} (*|times|x) {1}",
            "what is the product of {0} and {1}",
        ),
    ),
    ToolKind(
        ("search", "web_search", "search_web", "find", "lookup", "google"),
        "Search the web",
        (
            Parameter(
                ("query", "q", "text", "term", "keywords"), phrase, description="What to find"
            ),
        ),
        (
            "(search|look|google|search the web|search online) for {0}",
            "(find|find me|look up|search) {0}",
            "(can you |)(search|look) for {0}( on the web| online|)",
            "find (something|information|pages|articles) (about|on) {0}",
        ),
    ),
    ToolKind(
        ("translate", "translate_text", "translator"),
        "Translate a text",
        (
            Parameter(("text", "phrase", "input"), phrase),
            Parameter(("language", "to", "target", "lang"), pick(LANGUAGES)),
        ),
        ("translate {0} (to|into) {1}", "(what is|how do you say) {0} in {1}", "say {0} in {1}"),
    ),
    ToolKind(
        ("get_stock_price", "stock_price", "quote", "get_quote"),
        "Get the price of a stock",
        (Parameter(("symbol", "ticker", "stock"), pick(STOCKS)),),
        (
            "(what is|what's|give me|check) the (stock |share |)price of {0}",
            "(how much is|how is|price of) {0}( stock| shares|)( today|)",
            "{0} stock price",
        ),
    ),
    ToolKind(
        ("get_capital", "capital", "capital_of", "find_capital"),
        "Get the capital of a country",
        (Parameter(("country", "nation", "country_name"), pick(COUNTRIES)),),
        (
            "(what is|what's|name|tell me|which city is) the capital( city|) of {0}",
            "capital of {0}",
        ),
    ),
    ToolKind(
        ("get_population", "population", "count_people"),
        "Get the population of a country",
        (Parameter(("country", "place", "nation"), pick(COUNTRIES)),),
        (
            "(what is|what's|tell me) the population of {0}",
            "how many people live in {0}",
            "population of {0}",
        ),
    ),
    ToolKind(
        ("set_timer", "timer", "start_timer", "countdown"),
        "Start a timer",
        (Parameter(("minutes", "duration", "time"), number, "integer"),),
        (
            "(set|start|make) a timer (for|of) {0} minutes",
            "(wake me|remind me|call me) in {0} minutes",
            "timer {0} minutes",
        ),
    ),
    ToolKind(
        ("turn_on_light", "light_on", "lights", "set_light"),
        "Turn on the light in a room",
        (Parameter(("room", "where", "area"), pick(ROOMS)),),
        (
            "(turn on|switch on) the (light|lights|lamp) in the {0}",
            "(light|lights|lamp) on in the {0}",
            "make it bright in the {0}",
        ),
    ),
    ToolKind(
        ("send_message", "message", "send_text", "notify"),
        "Send a message to a person",
        (
            Parameter(("to", "recipient", "person", "name"), person),
            Parameter(("text", "message", "body"), phrase),
        ),
        ("(send|write|message|text) {0}: {1}", "tell {0} {1}", "(send|write) {0} the message {1}"),
    ),
    ToolKind(
        ("find_contact", "get_phone_number", "phone_book", "contact"),
        "Find the phone number of a person",
        (Parameter(("name", "person", "who"), person),),
        (
            "(what is|what's|find|look up|give me) (the |)(phone |)number of {0}",
            "how can i (reach|call) {0}",
            "(call|phone) {0}",
        ),
    ),
    ToolKind(
        ("convert_currency", "convert", "exchange"),
        "Convert an amount of US dollars",
        (
            Parameter(("amount", "value", "sum"), number, "integer"),
            Parameter(("currency", "to", "target"), pick(CURRENCIES)),
        ),
        (
            "(convert|change|exchange) {0} dollars (to|into) {1}",
            "(how much|what) (is|are) {0} dollars in {1}",
            "{0} dollars in {1}",
        ),
    ),
    ToolKind(
        ("play_music", "play", "play_song", "music_player"),
        "Play music",
        (Parameter(("title", "song", "what"), phrase),),
        ("play {0}( for me| now|)", "(i want to hear|put on) {0}", "play some {0}"),
    ),
    ToolKind(
        ("track_order", "order_status", "get_order", "lookup_order"),
        "Look up an order",
        (Parameter(("order_id", "id", "number"), code),),
        (
            "where is (my |)order {0}",
            "(what is|check|track) the status of order {0}",
            "(track|find|look up|check) order {0}",
        ),
    ),
)
