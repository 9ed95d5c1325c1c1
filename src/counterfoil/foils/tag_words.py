"""Words of photo captions by word class, for a tagger that needs no model."""

from __future__ import annotations

from counterfoil.foils.lists import ATTRIBUTES, DIGITS, NUMERALS

# Tags of words that have only one.
DETERMINER, PRONOUN, AUXILIARY, PREPOSITION = "determiner", "pronoun", "auxiliary", "preposition"
CONJUNCTION, ADVERB, NUMBER, TO = "conjunction", "adverb", "number", "to"
NOUN, VERB, ADJECTIVE, POSSESSIVE, SIGN = "noun", "verb", "adjective", "possessive", "sign"

_CLOSED = {
    DETERMINER: (
        "a an the this these those some any each every another no either neither his her its their "
        "my your our whose other same own such"
    ),
    PRONOUN: (
        "he she it they him them we us you i me himself herself itself themselves something "
        "someone somebody anything everyone everybody everything what who whom which that there "
        "others both all whatever"
    ),
    AUXILIARY: (
        "is are was were be been being am has have had having do does did can could will would "
        "shall should may might must 're 've 'll 'd 'm ca wo"
    ),
    PREPOSITION: (
        "in on of with at down by for up from out into behind over through near around off along "
        "against under outside past during across towards about beside inside between onto like "
        "above toward among underneath atop without beneath amongst below within amid aboard "
        "amidst beyond upon via astride alongside throughout than"
    ),
    CONJUNCTION: (
        "and or but nor while as when where how if because though although so whilst & before "
        "after until"
    ),
    ADVERB: (
        "very outdoors indoors away just also here well nearby ahead upside too still almost quite "
        "not n't somewhere backwards backward forward together else even somewhat apart rather "
        "maybe perhaps aside already sideways again now later once upwards upward downhill uphill "
        "upright overhead instead downward everywhere only then never always really alone back"
    ),
    NUMBER: (
        "several many few numerous multiple various eleven twelve thirteen fourteen fifteen twenty "
        "thirty hundred dozen"
    ),
    POSSESSIVE: "'s '",
    TO: "to",
}
CLOSED = {word: tag for tag, line in _CLOSED.items() for word in line.split()}
CLOSED.update(dict.fromkeys((*NUMERALS, *DIGITS), NUMBER))

_ADJECTIVES = (
    "young little asian older elderly old blond blonde many dark female male long busy bright "
    "wooden colorful colourful outdoor indoor open sunny african full light hard beautiful ready "
    "american public high snowy electric martial younger traditional concrete different grassy "
    "happy indian chinese hot giant military musical empty asleep bald oriental plaid plastic "
    "clear dirty third heavy sandy wet opposite floral teenage urban beige caucasian cloudy muddy "
    "homeless new local nice professional protective ethnic acoustic reflective rocky funny middle "
    "formal narrow casual good cold foreign fresh cute athletic curly eastern western japanese "
    "free teal scenic mobile inflatable lone medical shallow calm sleeveless great naked strange "
    "second electronic fancy similar visible hispanic wide warm homemade odd fat golden fake low "
    "newborn thin native messy round rural mexican dry circular electrical live pretty facial "
    "religious bare upper lower main aerial airborne ornate topless single olympic quiet flat "
    "hawaiian fast rough attractive square makeshift major poor dusty rainy thick identical silly "
    "unusual tight underground interesting muslim shiny early late ancient vibrant deep whole "
    "commercial barefoot frozen tropical intense larger smaller taller straight curious mechanical "
    "crazy residential metallic clean steep magic cool first senior wild daily stainless dangerous "
    "muscular special random decorative canadian extreme scottish european important industrial "
    "massive miniature metropolitan dead jewish ultimate portable lively furry defensive drunk "
    "national medium mature double last individual political shirtless fluffy leafy hairy blurry "
    "foggy icy lush modern vintage rusty fuzzy skinny chubby slim sad angry serious french italian "
    "spanish german british english korean arab adult maroon navy turquoise burgundy lavender neon "
    "khaki crimson magenta pale camouflage denim redheaded brunette unknown proud bloody handsome "
    "real best soft strong sharp smooth hilly wintry soapy friendly lovely chilly sleepy fit blank "
    "adjacent bored wooded nude latin tasty hollow left right"
)
ADJECTIVES = frozenset(_ADJECTIVES.split()) | frozenset(ATTRIBUTES)
COLOURS = frozenset(
    {"red", "orange", "yellow", "green", "blue", "purple", "violet", "pink", "brown", "black"}
    | {"white", "gray", "grey", "gold", "silver", "tan", "beige", "teal"}
)
ADJECTIVE_ENDINGS = (
    "ous",
    "ful",
    "less",
    "-haired",
    "-aged",
    "-old",
    "-skinned",
    "-hair",
    "-sleeve",
)

_VERBS = (
    "wear sit stand play walk look hold ride watch work dress talk take smile perform jump run use "
    "carry read make eat pose get wait prepare paint try gather dance enjoy surround sleep lay go "
    "sing lean cover throw put hang sell appear cross pull push laugh show cut give lie clean pass "
    "fill drink climb speak drive kick cook face set listen see catch hit help practice blow race "
    "say smoke relax compete reach attempt rest point stop swim fix skateboard raise kiss move "
    "swing open fly come shop draw sweep surf check fall wash kneel examine pick build write shoot "
    "observe wave hug strip attach overlook serve include dig tie display pour jog brush touch "
    "seem participate buy shovel celebrate close decorate chase balance bend lift inspect cry "
    "shave grill lead roll share juggle float place engage operate march start shake discuss fold "
    "converse hike head apply protest wrap slide photograph crouch weld leave travel stretch tend "
    "follow grab cheer teach repair turn load paddle create feed keep flip fight attend dive view "
    "approach enter carve entertain handle adjust splash skate row leap embrace admire begin stir "
    "squat weave stick spray mix spread peer stare finish tackle step receive chat pause feature "
    "wrestle hide find toss focus pray pack await win knit mow extend plant spin depict kayak "
    "gesture browse assist demonstrate guard offer nap gaze interact break strike lounge collect "
    "grind lick clutch study accompany chop aim present act live sort pretend happen drop clap bow "
    "decide rush yell tell harvest think protect capture bounce learn concentrate arrange become "
    "feel need stay scale rub strum pet chew bite crawl trot gallop bark wade sniff stroll land "
    "lounge rise let exit contain bake tug shout scream sail tumble dribble pitch bat hurl lunge "
    "bathe descend ascend peek pedal straddle rake wipe hammer drill saw slice deliver join remove "
    "play pump have do"
)
VERBS = frozenset(_VERBS.split())
_PASTS = (
    "held worn ridden made taken thrown lit built cut hung sat stood ran caught drawn driven blown "
    "torn bent laid put set seen shown written broken woven clad done got fallen sold strewn stuck "
    "spread knit kept led wrote ate drunk flew grown hidden spun swept tied"
)
PASTS = frozenset(_PASTS.split())
# Third persons that captions use as nouns far more often.
_PLURALS = (
    "lights hands drinks shorts glasses cars boats plants places bats saws rows sets works benches "
    "dresses flies heads ties boxes cooks swings guards shops feet pets stands gestures"
)
USUALLY_PLURALS = frozenset(_PLURALS.split())

_ING_NOUNS = (
    "building clothing setting swing gathering wedding railing ring string lighting ceiling "
    "evening advertising awning lettering morning spring stocking thing king earring sibling wing "
    "sling scaffolding something anything nothing everything opening landing outing meeting "
    "duckling"
)
ING_NOUNS = frozenset(_ING_NOUNS.split())
# Gerunds that name a purpose when a noun follows: swimming pool, hiking gear.
_PURPOSES = (
    "swimming hiking fishing bowling dining living parking washing sewing shopping skiing climbing "
    "racing boxing training waiting cutting sleeping welding riding diving bathing wrestling "
    "hunting skating walking playing cooking camping frying steering fencing running surfing "
    "dancing drinking"
)
PURPOSES = frozenset(_PURPOSES.split())
ED_NOUNS = frozenset(
    {"bed", "sled", "moped", "speed", "shed", "seed", "weed", "bobsled", "seaweed"}
)
LY_NOUNS = frozenset({"family", "fly", "butterfly", "belly", "jelly", "assembly", "rally", "bully"})
IRREGULAR_PLURALS = frozenset({"men", "women", "people", "children", "police", "sheep", "firemen"})
