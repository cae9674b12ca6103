"""Common English words that the generated tasks draw their keys and word lists from; none stands twice."""

from __future__ import annotations

_NOUNS = """
acorn airport alcove almond alphabet anchor ankle antler anvil apple apricot apron arch archive armchair
arrow artist ash atlas attic autumn avenue axe badge bakery balcony ballad balloon bamboo banana banjo
banner barley barn barrel basin basket bassoon bay beacon bead beaker beam bean bear beaver bedroom bee
beetle bell bench berry bicycle birch biscuit blanket blossom boat bolt bonfire book boot bottle boulder
bowl box bracelet branch brass bread brick bridge broom brush bucket buckle buffalo bugle builder bulb
burrow bus butter button cabbage cabin cactus cage cake calendar camel camera camp canal candle candy canoe
canvas canyon cape captain caravan carbon card carpet carriage carrot cart castle cat cave cedar ceiling
cellar cello cement chain chair chalk chapel chapter charcoal cherry chess chestnut chimney chisel chocolate
church cinema cinnamon circle clarinet clay cliff clock cloud clover coach coal coast coat cobra coconut
coffee coin collar comb comet compass copper coral cork corn cottage cotton couch cousin cow crab cradle
crane crater crayon creek crew cricket crow crown crystal cup cupboard curtain cushion cymbal daisy dam
dancer dawn deer delta desert desk diamond diary dinner diver dock doctor dog dollar dolphin donkey door
dough dove dragon drawer dress drum duck dune dust eagle earth easel echo eel egg elbow elephant elevator
elk ember emerald engine envelope eraser estuary evening fabric factory falcon farmer feather fence fern
ferry festival fiddle field finger fir fisherman flag flame flask flint flock flour flute fog forest fork
fossil fountain fox frame freezer friend frog frost fruit funnel gallery garden garlic garment gate geyser
ghost ginger giraffe girl glacier glass globe glove glue goat gold goose grain granite grape grass gravel
grove guitar gulf hail hallway hammer hammock harbour harp hat hawk hay hazel heater hedge helmet heron hill
hinge hippo honey hoof horizon horn horse hospital hotel house hurdle ice iceberg icicle igloo ink island
ivory ivy jacket jaguar jam jar jasmine jelly jewel journal judge jug juice jungle kayak kettle keyboard
kingdom kitchen kite kitten knee knight knot ladder lagoon lake lamb lamp lantern laurel lava lawn leaf
leather ledger lemon lemonade lens leopard letter library lichen lighthouse lilac lime linen lion lizard
lobster locket locomotive log lumber lynx magnet mailbox mammoth mango maple marble market marsh mask mason
mast meadow medal melon meteor mill mineral minute mirror mist mole monkey moon moose mosaic mosquito moss
moth motor mountain mouse mud muffin mule museum mushroom musician mustard napkin necklace needle nephew
nest newspaper night noodle notebook nurse oak oar oasis oboe ocean octopus olive onion orange orbit orchard
orchid organ ostrich otter oven owl oyster paddle page painter palace palm pancake panda pantry paper
parachute parade parcel parrot passport path patio peach peacock pear pearl pebble pelican pencil penguin
pepper petal pheasant piano picnic pier pigeon pillow pilot pine pipe pirate pitcher planet plank plate
plaza pliers plough plum pocket poem poet pond pony poplar porch postcard potato pottery powder prairie
prince prism pudding puddle pulley pumpkin puppet puppy puzzle pyramid quarry quartz queen quill quilt
rabbit raccoon radio radish raft railway rain rake raven razor reef reindeer ribbon rice ridge ring river
road robin robot rocket roof rope rose ruby rudder rug saddle sail sailor salad salmon salt sandal sandwich
sapphire satchel satin saucer sausage savanna scarf school scissors scooter seal season secretary shadow
shark sheep shelf shell shepherd shield ship shirt shoe shore shovel shower shrimp shrub signal silk silver
singer siren sister skate sketch skirt slate sleeve slipper snail snake snow soap sock sofa soldier soup
spade sparrow sphere spider spinach spire sponge spoon spring spruce squirrel stable staircase stamp
starfish statue steam steel stem stew stick stone stool storm stove stream street studio sugar suitcase
summer sunset swamp swan sword table tailor tambourine tapestry teacher teapot telescope temple tent theatre
thimble thistle throne thunder ticket tiger timber toad toast tobacco tomato torch tornado tortoise towel
tower tractor train tray treasure trumpet trunk tulip tunnel turkey turnip turtle twig umbrella uncle valley
vase vault velvet village vine vinegar violet violin volcano voyage waffle wagon waiter wallet walnut walrus
warehouse watch waterfall wax weasel weaver web well whale wharf wheat wheel whistle widow willow window
wing winter wire wolf wool wreath yacht yard yarn zebra zipper
"""
_ADJECTIVES = """
able abrupt absent active agile alert alive amber ample ancient angry anxious arctic awake aware azure
bashful basic beige bitter black blank bleak blue blunt bold brave brief bright brisk broad brown bumpy busy
calm careful careless cautious central charming cheap cheerful chilly civil clean clear clever close clumsy
coarse cold comfortable common complete cool correct costly cosy crimson crisp crooked curious curly daily
damp dark dear decent deep delicate dense dim distant double dramatic dry dull eager early eastern easy
elastic electric elegant empty endless equal exact expensive faded faint fair faithful familiar famous fancy
fast fatal fearless feeble fierce final firm flat flexible fluffy foggy foolish foreign formal fragile frank
free frequent fresh friendly frozen full funny furry fuzzy gentle giant gigantic glad global gloomy glossy
golden good graceful grand grateful grave green grey grim handsome handy happy hard harsh hasty healthy
heavy helpful hidden hollow honest huge humble hungry icy ideal idle immense important innocent instant
jolly joyful juicy keen kind large late lazy lean legal light likely little lively local lonely long loose
loud lovely lucky major marine mature mellow merry messy mighty mild minor modern modest moist moral muddy
narrow native neat nervous new nice nimble noble noisy normal northern numb obvious odd old only open
ordinary oval pale patient perfect pink plain playful pleasant plump polite poor popular precious pretty
previous proud public pure purple quick quiet rapid rare raw ready real recent red regular remote rich rigid
ripe rough round royal rural rusty sad safe salty scarce scarlet secure separate serene serious severe
shallow sharp shiny short shy silent simple single sleepy slender slim slow small smart smooth soft solar
solid sour southern spare special spicy square stale steady steep stern sticky stiff still straight strange
strict strong stubborn sturdy subtle sudden sunny sure sweet swift tall tame tart tasty tender thick thin
thirsty tidy tight tiny tired tough tropical true ugly unique upper upright urban urgent usual vacant vague
vast verbal vivid warm weak weary western wet white whole wicked wide wild windy wise wooden woolly yellow
young zealous
"""
_VERBS = """
absorb accept achieve admire admit adopt advise agree allow amuse announce annoy answer appear applaud
arrange arrive ask assist attach attend avoid bake bathe become begin behave believe belong blink blow boil
borrow bounce breathe bring build bury buy calculate carry carve catch cause celebrate change chase choose
chop claim climb collect combine compare complain confess connect consider contain continue cough count
create creep cross cry cure damage decide decorate defend delay deliver deny depend describe deserve destroy
detect develop disagree disappear discover divide dream drift drink drive earn eat educate employ encourage
enjoy enter escape examine exist expand expect explain explore fade fail fasten fetch fill find finish float
fold follow forget forgive gather gaze giggle give glow gossip grab greet grin grow guess guide happen hatch
heal heap help hesitate hope hug hunt hurry identify imagine improve include increase inform inject instruct
intend invent invite itch join juggle jump kneel knit know laugh launch lead learn leave lend lift listen
live manage measure melt memorise mend mention mix move multiply murmur need nod notice obey observe obtain
occur offer order owe own pardon pause peel perform permit persuade plan pluck poke polish possess pour
practise pray precede prefer prepare preserve pretend prevent produce promise protect provide pull punish
push question reach realise receive recognise reduce reflect refuse regret reject rejoice relax release rely
remain remember remind remove repair repeat replace reply report rescue retire return rinse rise roll rot
ruin sack satisfy scatter scold scrub search sell send serve settle sew shake share shave shiver shout shrug
shut sigh sing sink sit sleep slip smash smile sneeze sniff snore soak spell spend spill spin spoil spread
sprout squash squeak squeeze stare start stay steal stir stitch stop strap stretch strip stroke stumble
succeed suffer suggest supply support suppose surprise surround suspend swallow sway swim swing switch talk
tap tease tell tempt thank think throw tickle tie touch trace trade travel treat tremble trick trot trust
try tug twist understand undress unlock untie vanish visit wait wake walk wander warn wash waste wave weigh
welcome whine whirl whisper win wink wipe wish wobble wonder worry wrap wrestle write yawn yell
"""

NOUNS = tuple(_NOUNS.split())
ADJECTIVES = tuple(_ADJECTIVES.split())
VERBS = tuple(_VERBS.split())
